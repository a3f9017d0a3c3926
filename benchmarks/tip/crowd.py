"""Does letting go of steps make room for others, where a pass reads its weights once for all rows?

    python benchmarks/tip/crowd.py --requests 12 --tokens 512 --fit 3 --out crowd/result.json

The embedded model and forced tokens: short prompts, long answers, steps of sixteen tokens into
eight registers in turn. All requests are submitted at once, to a pool that holds `--fit` whole
answers; the clock runs until the last one is done. Three sides, in turn, in one process: the text
without registers; with registers; and the latter with nothing let go of. How well the model writes
is of no concern; `throughput.py` measures the same with the tiny models' own answers.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from caches import remembering
from long_context import PROMPT, script_of
from sides import Side, in_turn, ratios

from stretto import LM, SamplingParams
from stretto.bench.experiment import told
from stretto.bench.machine import describe_machine
from stretto.bench.pairs import rested, rounded
from stretto.files import write_atomically
from stretto.models import EMBEDDED_MODEL, load_hf, resolve

DENSE, TIP, REMEMBERING = "dense", "tip", "tip that lets go of nothing"
STEP_TOKENS, REGISTERS = 16, 8
WARM_TOKENS = 8


def finished(
    side: Side, requests: int, tokens: int, script: Callable[[str, int], int]
) -> dict[str, Any]:
    """One run: all requests, so many tokens each."""
    params = SamplingParams(max_tokens=tokens)
    streams = [side.lm.submit(PROMPT, params, script=script) for _ in range(requests)]
    measured = side.run(streams)
    lives = [stream.completion.live_kv for stream in streams]
    return rounded(
        {
            **measured,
            "tokens": sum(stream.completion.trace.num_tokens for stream in streams),
            "live_peak": max(live.peak for live in lives),
            "reserved_peak": max(live.pool_peak_slots for live in lives),
        }
    )


def sides_of(fit: int, tokens: int, page: int) -> list[Side]:
    """Over the same weights, each with a pool of its own that holds `fit` whole answers."""
    model, tokenizer = load_hf(resolve(EMBEDDED_MODEL).path)
    prompt = LM.wrap(model, tokenizer, engine="hf", pool_slots=2).encode(PROMPT)
    whole = -(-(len(prompt) + tokens) // page) * page
    room = {"engine": "auto", "pool_slots": fit * whole, "page_size": page}
    tip = LM.wrap(model, tokenizer, dialect="tip", **room)
    dense, kept = (remembering(LM.wrap(model, tokenizer, card=tip.card, **room)) for _ in range(2))
    return [Side(DENSE, dense), Side(TIP, tip), Side(REMEMBERING, kept)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="of an answer with registers")
    parser.add_argument("--fit", type=int, default=3, help="dense answers that the pool holds")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    text_tokens = given.tokens - -(-given.tokens // STEP_TOKENS)  # without registers
    sides = sides_of(given.fit, given.tokens, given.page_size)
    scripts = {side.name: script_of(side.lm, STEP_TOKENS, REGISTERS) for side in sides}
    scripts[DENSE] = script_of(sides[0].lm, given.tokens, 0)
    tokens = {DENSE: text_tokens, TIP: given.tokens, REMEMBERING: given.tokens}
    for pair in range(-1, given.pairs):
        for side in in_turn(pair, sides):
            asked = tokens[side.name] if pair >= 0 else WARM_TOKENS
            script = scripts[side.name]
            measured = rested(partial(finished, side, given.requests, asked, script))
            if pair >= 0:
                side.measured.append({"pair": pair, **measured})
                print(f"{side.name}: {measured['seconds']:.2f} s", file=sys.stderr, flush=True)
    result = {
        "command": shlex.join(["python", "crowd.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "engine": sides[0].lm.engine.name,
        "pool_slots": sides[0].lm.engine.num_slots,
        "ratios": [
            *ratios(sides, "seconds", DENSE, (TIP, REMEMBERING)),
            *ratios(sides, "seconds", REMEMBERING, (TIP,)),
        ],
        "sides": {side.name: side.measured for side in sides},
    }
    write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    for row in result["ratios"]:
        print(f"{row['ratio']} is {row['median']} ({row['low']} to {row['high']})")
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
