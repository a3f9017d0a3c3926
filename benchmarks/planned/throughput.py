"""How many times the throughput of one request at a time do eight at once have?

    python benchmarks/planned/throughput.py --sets 9 --out throughput/result.json

A set is eight test problems. In one process, on one model, all of a set are answered one after the
other, and all at once; which comes first alternates from set to set. The ratio is the median over
sets of the time one after the other by the time at once: the work is the same. Its interval is a
95 % bootstrap over sets. `same_texts`: answers that are the same both times, of all.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from answers import SEEDS, load, params_of, warm
from cells import CELLS, KINDS, Cell
from claims import TOGETHER

from stretto import LM
from stretto.bench.machine import describe_machine
from stretto.bench.pairs import bootstrap_median, rested, rounded, run_pair
from stretto.completion import Completion
from stretto.eval.multipart import problems
from stretto.files import write_atomically

WAYS = ("autoregressive", "pasta", "sparse", "sparse tau=0.9", "dense", "dense tau=0.9")
SLOTS = 1024
"""Of the pool, for each request."""


def answered(lm: LM, cell: Cell, prompts: Sequence[str], at_once: int) -> dict[str, Any]:
    """Seconds to answer all prompts, so many at a time, and the texts."""
    began, done = time.perf_counter(), list[Completion]()
    for first in range(0, len(prompts), at_once):
        some = prompts[first : first + at_once]
        streams = [lm.submit(p, params_of(cell), method=cell.method) for p in some]
        done += [stream.finish() for stream in streams]
    took = time.perf_counter() - began
    tokens = sum(c.usage.completion_tokens for c in done)
    return {
        "seconds": took, "tokens": tokens, "tokens_per_s": tokens / took,
        "texts": [c.text for c in done], "unfinished": sum(c.finish_reason != "stop" for c in done),
    }  # fmt: skip


def measured(lm: LM, cell: Cell, sets: Sequence[Sequence[str]]) -> dict[str, Any]:
    """All sets in both ways, and their ratio."""
    pairs, same = [], 0
    for number, prompts in enumerate(sets):
        alone, together = run_pair(
            number,
            lambda p=prompts: rested(lambda: answered(lm, cell, p, 1)),  # type: ignore[misc]
            lambda p=prompts: rested(lambda: answered(lm, cell, p, len(p))),  # type: ignore[misc]
        )
        texts = zip(alone.pop("texts"), together.pop("texts"), strict=True)
        same += sum(a == b for a, b in texts)
        pairs.append({"alone": rounded(alone), "together": rounded(together)})
    found = bootstrap_median([p["alone"]["seconds"] / p["together"]["seconds"] for p in pairs], 0)
    return {
        "cell": cell.name, "group": cell.group, "sets": len(sets), "ratio": found.median,
        "ratio_low": found.low, "ratio_high": found.high, "same_texts": same,
        "of": sum(map(len, sets)), "pairs": pairs,
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--sets", type=int, required=True)
    made.add_argument("--out", type=Path, required=True)
    return made


def main() -> int:
    given = parser().parse_args()
    found = [p.prompt for p in problems(SEEDS["test"], TOGETHER * given.sets, "test", kinds=KINDS)]
    sets = [found[first : first + TOGETHER] for first in range(0, len(found), TOGETHER)]
    ways = []
    for cell in (c for c in CELLS if c.name in WAYS):
        lm = load(cell.arm, pool_slots=SLOTS * TOGETHER)
        warm(lm, cell)
        ways.append(measured(lm, cell, sets))
        print(f"{cell.name}: {ways[-1]['ratio']:.2f} times", file=sys.stderr, flush=True)
    result = {
        "command": shlex.join(["python", "throughput.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "together": TOGETHER,
        "ways": ways,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
