"""What a step costs after thousands of tokens of which most are let go of, on the embedded model.

    python benchmarks/tip/long_context.py --context 4096 --live 512 --out long-context/result.json

Forced tokens: steps of equal length into sixteen registers in turn, so that the last sixteen are
seen. Three sides: with the registers; the same tokens with nothing let go of; and the latter after
no more tokens than the first one sees. Once each is where it should be, all go on by a few tokens
in turn, one row a pass, and these steps are timed. How well the model writes is of no concern.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from caches import remembering
from sides import Side, in_turn, ratios

from stretto import LM, SamplingParams
from stretto.bench.experiment import told
from stretto.bench.machine import describe_machine
from stretto.bench.pairs import rested, rounded
from stretto.dialects.registers import DEFAULT_REGISTERS, register_name
from stretto.files import write_atomically
from stretto.models import EMBEDDED_MODEL, load_hf, resolve
from stretto.stream import Stream

PROMPT = "Count."
TIP, DENSE, SHORT = "tip", "dense", "dense, short"


def script_of(
    lm: LM, step_tokens: int, num_registers: int = DEFAULT_REGISTERS
) -> Callable[[str, int], int]:
    """A register, then words, again and again; of no registers words alone."""
    registers = [lm.card.control[register_name(i)] for i in range(num_registers)]
    words = lm.vocabulary.encode(" one two three four five six seven eight nine ten")

    def forced(_: str, index: int) -> int:
        step, place = divmod(index, step_tokens)
        is_register = place == 0 and registers
        return registers[step % len(registers)] if is_register else words[index % len(words)]

    return forced


def advanced(side: Side, script: Callable[[str, int], int], start: int, room: int) -> Stream:
    """A request that has written `start` tokens and may write `room` more."""
    params = SamplingParams(max_tokens=start + room)
    stream = side.lm.submit(PROMPT, params, script=script)
    while stream.request.num_drawn < start:
        side.lm.scheduler.step()
    return stream


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens written before")
    parser.add_argument("--live", type=int, default=512, help="of these seen with registers")
    parser.add_argument("--tokens", type=int, default=32, help="timed in each turn")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    step_tokens = max(2, given.live // DEFAULT_REGISTERS)
    room = given.tokens * (given.pairs + 2)
    slots = 2 * (given.context + room) + 64 * given.page_size
    sides = _sides(-(-slots // given.page_size) * given.page_size, given.page_size)
    starts = {TIP: given.context, DENSE: given.context, SHORT: max(1, given.live - room // 2)}
    streams = {}
    for side in sides:
        script = script_of(side.lm, step_tokens)
        streams[side.name] = advanced(side, script, starts[side.name], room)
        print(f"{side.name} has written {starts[side.name]} tokens", file=sys.stderr, flush=True)
    for pair in range(-1, given.pairs):
        for side in in_turn(pair, sides):
            stream = streams[side.name]
            measured = rested(partial(side.run, [stream], given.tokens))
            measured["pass_ms"] = 1000 * measured["pass_seconds"] / measured["passes"]
            if pair >= 0:
                side.measured.append(rounded({"pair": pair, **measured}))
    for stream in streams.values():
        stream.close()
    lives = {name: stream.completion.live_kv for name, stream in streams.items()}
    result = {
        "command": shlex.join(["python", "long_context.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "engine": sides[0].lm.engine.name,
        "ratios": [
            row
            for figure in ("step_ms", "pass_ms")
            for row in ratios(sides, figure, DENSE, (TIP, SHORT))
        ],
        "live_peak": {name: live.peak for name, live in lives.items()},
        "sides": {side.name: side.measured for side in sides},
    }
    write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    for row in result["ratios"]:
        print(f"{row['ratio']} is {row['median']} ({row['low']} to {row['high']})")
    return 0


def _sides(slots: int, page: int) -> list[Side]:
    """Over the same weights, each with a pool of its own."""
    model, tokenizer = load_hf(resolve(EMBEDDED_MODEL).path)
    room = {"engine": "auto", "pool_slots": slots, "page_size": page}
    tip = LM.wrap(model, tokenizer, dialect="tip", **room)
    others = [remembering(LM.wrap(model, tokenizer, card=tip.card, **room)) for _ in range(2)]
    return [Side(name, lm) for name, lm in zip((TIP, DENSE, SHORT), (tip, *others), strict=True)]


if __name__ == "__main__":
    sys.exit(told(main))
