"""Budgets at which each method holds as much as TIP does: the same mean of live generated tokens.

    python benchmarks/tip/budgets.py --model DENSE --held budgets-0/tip-kv-0.jsonl \\
        --tasks program,tree --sizes 20-28 --num 63 --split valid --out budgets-0/budgets.json

The mean that is to be met is that of the rows of `--held`, one a task and sizes, so these must be
answers to problems of the validation split too. A method's budget is the smallest one with which
its own answers to such problems hold at least as much: found by halving, by decoding. So none holds
more than the step of one token allows, and none less than TIP but one whose answers end at once,
whatever its budget is: then `is_enough` is false.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from answered import problems_of, read_solved
from answers import (
    REQUESTS,
    REQUESTS_LISTENING,
    decode,
    load,
    max_tokens,
    needed,
    slots_for,
)
from caches import Budgeted

from stretto.bench.experiment import told
from stretto.errors import InvalidInput
from stretto.files import write_atomically
from stretto.methods import EVICTING, extras
from stretto.problems import Problem

PAGE_TOKENS = 1
"""Hidden together: single tokens, so that each method makes the most of its budget."""
SINKS = 4
UNPINNED = ("streaming_llm",)
"""With a pinned prompt, in which its sinks are, it would be the window token for token."""
LEAST = 4 + SINKS
"""A budget that every method can hold."""


def window_budget(live: float, length: float) -> float:
    """The budget of a window that sees `live` generated tokens on average over an answer of
    `length`: the root of live = B - B(B - 1) / 2T, docs/policies.md."""
    half = length + 0.5
    return half - max(0.0, half * half - 2 * length * live) ** 0.5


def smallest(low: int, high: int, is_enough: Callable[[int], bool], guess: int) -> int:
    """The smallest number from `low` to `high` that is enough, and `high` if none is; larger ones
    are if smaller ones are. Looks around `guess` first, in growing strides."""
    at, stride, most = min(max(guess, low), high), 1, high
    if is_enough(at):
        high = at
        while low < high and is_enough(at := max(low, high - stride)):
            high, stride = at, 2 * stride
        low = min(at + 1, high)
    else:
        low = at + 1
        while low < high and not is_enough(at := min(high, at + stride)):
            low, stride = at + 1, 2 * stride
        high = max(low, at)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return min(low, most)


def held_on_average(rows: Sequence[Any]) -> float:
    return statistics.fmean(row.generated_mean for row in rows)


def chosen(
    lm: Any, problems: Sequence[Problem], method: Budgeted, target: float, requests: int
) -> dict[str, Any]:
    """A row of the result: the method's budget for these problems, and what it then holds."""
    held: dict[int, float] = {}

    def is_enough(budget: int) -> bool:
        own = Budgeted(method.rule, budget, method.pin_prompt, method.page_tokens)
        rows: list[Any] = []
        for start in range(0, len(problems), requests):
            rows += decode(lm, problems[start : start + requests], lambda _: own, own.label)[0]
        held[budget] = held_on_average(rows)
        return held[budget] >= target

    length = statistics.fmean(len(p.response()) for p in problems)
    most = max(len(p.prompt) + 8 + max_tokens(p) for p in problems)  # hides nothing
    sinks = SINKS if method.rule == "streaming_llm" else 0
    guess = round(window_budget(target, length)) + sinks
    budget = smallest(LEAST, most, is_enough, guess)
    if budget not in held:
        is_enough(budget)
    return {
        "rule": method.rule,
        "pin_prompt": method.pin_prompt,
        "page_tokens": method.page_tokens,
        "budget": budget,
        "held": round(held[budget], 3),
        "target": round(target, 3),
        "is_enough": held[budget] >= target,
        "tried": {str(b): round(h, 3) for b, h in sorted(held.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--sizes", default="20-28")
    parser.add_argument("--num", type=int, default=63)
    parser.add_argument("--split", default="valid")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = read_solved([given.held])
    cells = problems_of(given.tasks.split(","), given.sizes.split(","), given.num, given.split)
    found: list[dict[str, Any]] = []
    for rule in EVICTING:
        requests = REQUESTS_LISTENING if extras(needed(rule)) else REQUESTS
        slots = slots_for([p for cell in cells.values() for p in cell], requests)
        lm = load(given.model, slots, needed(rule))
        for (task, sizes), problems in cells.items():
            names = {problem.id for problem in problems}
            held = [row for row in rows if row.problem in names]
            if len({row.problem for row in held}) < len(names):
                raise InvalidInput(
                    f"{given.held} has answers to {len({r.problem for r in held})} of "
                    f"{len(names)} {task} problems of sizes {sizes}; answer those first"
                )
            for pin in (False,) if rule in UNPINNED else (False, True):
                method = Budgeted(rule, LEAST, pin, PAGE_TOKENS)
                row = chosen(lm, problems, method, held_on_average(held), requests)
                found.append({"task": task, "sizes": sizes, **row})
                print(f"{task} {sizes} {method.label}: {row['tried']}", file=sys.stderr)
    result = {"model": str(given.model), "split": given.split, "budgets": found}
    write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
