"""Does letting go of steps make room for others? A set of problems, and a pool that is too small.

    python benchmarks/tip/throughput.py --dense DENSE --tip TIP --out throughput/result.json

All problems are submitted at once; the clock runs until the last one is answered. Three sides, in
turn, in one process: the dense model; the model with registers; and the same one with registers
that let go of nothing, which writes as many tokens for each text. Twice: with a pool that holds a
few whole dense answers, and with one that holds all of them at once. Prompts are as long as the
answers are, both sides keep them, and rows of so small a model cost as much as a pass: a lower
bound (`crowd.py` is the other case).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from answers import max_tokens
from caches import remembering
from sides import Side, in_turn, ratios

from stretto import LM, SamplingParams
from stretto.bench.experiment import told
from stretto.bench.machine import describe_machine
from stretto.bench.pairs import rested, rounded
from stretto.files import write_atomically
from stretto.problems import Problem, parse_sizes, problems

BASELINE, TIP, REMEMBERING = "dense", "tip", "tip that lets go of nothing"


def answered(side: Side, found: Sequence[Problem]) -> dict[str, Any]:
    """One run over the set."""
    streams = [
        side.lm.submit(problem.prompt, SamplingParams(max_tokens=max_tokens(problem)))
        for problem in found
    ]
    measured = side.run(streams)
    done = [stream.completion for stream in streams]
    tokens = sum(c.trace.num_tokens for c in done)
    right = sum(
        c.finish_reason == "stop" and p.check(c.text) for c, p in zip(done, found, strict=True)
    )
    return rounded(
        {
            **measured,
            "tokens": tokens,
            "text_tokens": sum(c.usage.completion_tokens for c in done),
            "tokens_per_s": tokens / measured["seconds"],
            "accuracy": 100 * right / len(done),
        }
    )


def compared(given: argparse.Namespace, slots: int, found: Sequence[Problem]) -> dict[str, Any]:
    """All sides with a pool of so many slots; a first run over the set is not counted."""
    page, pairs = given.page_size, given.pairs
    slots = -(-slots // page) * page
    room = {"dtype": "float32", "pool_slots": slots, "page_size": page}
    sides = [
        Side(BASELINE, LM.load(given.dense, **room)),
        Side(TIP, LM.load(given.tip, **room)),
        Side(REMEMBERING, remembering(LM.load(given.tip, **room))),
    ]
    for pair in range(-1, pairs):
        for side in in_turn(pair, sides):
            measured = rested(partial(answered, side, found))
            if pair >= 0:
                side.measured.append({"pair": pair, **measured})
                print(f"pool of {slots}, {side.name}: {measured['seconds']:.2f} s", file=sys.stderr)
    return {
        "pool_slots": slots,
        "page_size": page,
        "ratios": [
            *ratios(sides, "seconds", BASELINE, (TIP, REMEMBERING)),
            *ratios(sides, "seconds", REMEMBERING, (TIP,)),
        ],
        "sides": {side.name: side.measured for side in sides},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dense", type=Path, required=True)
    parser.add_argument("--tip", type=Path, required=True)
    parser.add_argument("--tasks", default="program,tree")
    parser.add_argument("--sizes", default="20-28")
    parser.add_argument("--num", type=int, default=63, help="problems of each task")
    parser.add_argument("--fit", type=int, default=8, help="dense answers that the pool holds")
    parser.add_argument("--page-size", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    sizes = parse_sizes(given.sizes)
    found = [
        problem
        for task in given.tasks.split(",")
        for problem in problems(task, sizes, given.num, split="test")
    ]
    whole = max(len(p.prompt) + 3 + len(p.response()) for p in found)
    pools = {"small": given.fit * whole, "ample": len(found) * 2 * whole}
    result = {
        "command": shlex.join(["python", "throughput.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "problems": len(found),
        **{name: compared(given, slots, found) for name, slots in pools.items()},
    }
    write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    for name in pools:
        for row in result[name]["ratios"]:
            print(f"{name}: {row['ratio']} is {row['median']} ({row['low']} to {row['high']})")
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
