"""Answers of a model to made problems, greedy, with what each held; each once, however often run.

    python benchmarks/tip/answers.py --model MODEL --tasks program,tree --sizes 20-28 --num 99 \\
        --split test --as native --out answers/NAME.jsonl

`--as`: `native` (the model's own way), `remembering` (registers let go of nothing), `oracle` (the
graph lets go of steps of a dense model), `restart` (the tokens seen are computed anew for every
token), or `budgets`, with `--budgets` a file of `budgets.py`. A file of rows is of one model, and
of one file of budgets: those of another are refused (`NAME.settings.json`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from answered import Solved, Timed, problems_of, solved
from caches import Budgeted, Oracle, remembering
from restart import restarted

from stretto import LM, SamplingParams
from stretto.bench.experiment import told
from stretto.data.sample import request_seed
from stretto.data.settings import hold_to
from stretto.data.store import Store
from stretto.errors import ModelUnavailable
from stretto.methods import AUTO, Method, extras
from stretto.models.fingerprint import fingerprint
from stretto.problems import Problem
from stretto.problems.draw import VERSION

WAYS = ("native", "remembering", "oracle", "restart", "budgets")
REQUESTS = 128
REQUESTS_LISTENING = 16
"""With a method that needs attention weights, whose engine reads every slot of the pool."""
PAGE_SIZE = 9
"""Of the pool: the longest step of a model with registers. Methods that hide single tokens have
pages of one token."""
TOKENS_A_STEP = 10
"""An answer may have so many tokens for each step of the solution, which has 9 at most."""


def max_tokens(problem: Problem) -> int:
    return TOKENS_A_STEP * len(problem.steps)


def slots_for(problems: Sequence[Problem], requests: int) -> int:
    """KV slots that hold so many of the longest of these at once, nothing let go of, in whole pages
    of which each step has its own."""
    longest = max(len(p.prompt) + 2 * PAGE_SIZE + max_tokens(p) for p in problems)
    return -(-longest // PAGE_SIZE) * PAGE_SIZE * min(requests, len(problems))


def params_of(problem: Problem) -> SamplingParams:
    """Greedy; what a method draws of its own is of the problem."""
    return SamplingParams(max_tokens=max_tokens(problem), seed=request_seed(0, problem.prompt))


def decode(
    lm: LM, problems: Sequence[Problem], method: Callable[[Problem], str | Method], label: str
) -> tuple[list[Solved], float]:
    """Answers decoded together, in order, and the seconds they took. Of a pool whose pages are
    single tokens no pages are told."""
    began = time.perf_counter()
    streams = []
    try:
        for problem in problems:
            own = params_of(problem)
            streams.append(lm.submit(problem.prompt, own, method=method(problem)))
        completions = [stream.finish() for stream in streams]
    finally:
        for stream in streams:
            stream.close()
    seconds = time.perf_counter() - began
    has_pages = lm.scheduler.pool.page_size > 1
    pairs = zip(problems, completions, strict=True)
    return [solved(label, p, c, has_pages=has_pages) for p, c in pairs], seconds


Decoder = Callable[[Sequence[Problem], str], tuple[list[Solved], float]]
"""Answers problems together under a label, and says how many seconds that took."""


@dataclass(frozen=True)
class Cell:
    """Problems of a kind to be answered in one way, so many at once."""

    label: str
    name: str
    problems: Sequence[Problem]
    requests: int = REQUESTS


def answer(out: Path, cell: Cell, decoder: Decoder) -> None:
    """Decodes those of a cell that the file lacks, and says how long it took."""
    label, problems = cell.label, cell.problems
    with Store(out, Solved) as store, Store(times_of(out), Timed) as times:
        left = [p for p in problems if f"{label}/{p.id}" not in store]
        for start in range(0, len(left), cell.requests):
            part = left[start : start + cell.requests]
            rows, seconds = decoder(part, label)
            time_row = Timed(
                label=label,
                part=f"{cell.name}/{part[0].id}",
                num_answers=len(rows),
                num_tokens=sum(row.num_tokens for row in rows),
                seconds=round(seconds, 3),
            )
            if time_row.key not in times:
                times.add(time_row)  # before the rows, which are not decoded again
            for row in rows:
                store.add(row)
        done = [store.rows[f"{label}/{p.id}"] for p in problems]
    right = sum(row.is_right for row in done) / len(done)
    live = sum(row.generated_mean for row in done) / len(done)
    print(f"{label} {cell.name}: {right:.1%} right, {live:.1f} live tokens", file=sys.stderr)


def times_of(out: Path) -> Path:
    return out.with_name(out.name.removesuffix(".jsonl") + ".times.jsonl")


def load(model: Path, slots: int, method: str | None = None) -> LM:
    """A model that decodes in its own way, or by a `method` that hides single tokens."""
    room = {"pool_slots": slots, "page_size": PAGE_SIZE if method is None else 1}
    return LM.load(model, dtype="float32", extras=extras(method or AUTO), **room)


def hold(out: Path, model: Path, budgets: Path | None) -> None:
    """Raises `InvalidInput` if the rows of a file are of another model, or of other budgets, and
    `ModelUnavailable` where there is none."""
    if not model.is_dir():
        raise ModelUnavailable(
            f"there is no model {str(model)!a}; run the stage that trains it once more: delete its "
            "folder from the results"
        )
    digest = None if budgets is None else hashlib.sha256(budgets.read_bytes()).hexdigest()[:16]
    settings = {"model": fingerprint(model), "budgets": digest, "problems": VERSION}
    beside = out.with_name(out.name.removesuffix(".jsonl") + ".settings.json")
    hold_to(beside, settings, str(out), has_rows=out.exists())


def needed(rule: str) -> str:
    """A method's text that says what its engine must do."""
    return f"{rule},budget=64"


def answer_by_budgets(
    model: Path, budgets: Path, cells: dict[tuple[str, str], list[Problem]], out: Path
) -> None:
    """Each budget of a file that is of one of the cells."""
    chosen = json.loads(budgets.read_text())["budgets"]
    for rule in dict.fromkeys(row["rule"] for row in chosen):
        requests = REQUESTS_LISTENING if extras(needed(rule)) else REQUESTS
        slots = slots_for([p for found in cells.values() for p in found], requests)
        lm = load(model, slots, needed(rule))
        for row in chosen:
            key = (row["task"], row["sizes"])
            if row["rule"] == rule and key in cells:
                method = Budgeted(rule, row["budget"], row["pin_prompt"], row["page_tokens"])
                cell = Cell(method.label, "/".join(key), cells[key], requests)
                answer(out, cell, _in_one_way(lm, method))


def _in_one_way(lm: LM, method: str | Method) -> Decoder:
    return lambda problems, label: decode(lm, problems, lambda _: method, label)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--sizes", default="20-28", help="LOW-HIGH, several with commas")
    parser.add_argument("--num", type=int, default=100, help="problems of each task and sizes")
    parser.add_argument("--split", default="test")
    parser.add_argument("--as", dest="way", choices=WAYS, default="native")
    parser.add_argument("--budgets", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if (given.way == "budgets") != (given.budgets is not None):
        parser.error("--as budgets and --budgets go together")
    hold(given.out, given.model, given.budgets)
    cells = problems_of(given.tasks.split(","), given.sizes.split(","), given.num, given.split)
    if given.way == "budgets":
        answer_by_budgets(given.model, given.budgets, cells, given.out)
        return 0
    lm = load(given.model, slots_for([p for found in cells.values() for p in found], REQUESTS))
    decoder = _decoder(lm, given.way)
    for key, problems in cells.items():
        answer(given.out, Cell(given.way, "/".join(key), problems), decoder)
    return 0


def _decoder(lm: LM, way: str) -> Decoder:
    if way in ("remembering", "restart") and lm.card.dialect == "plain":
        raise SystemExit(f"{lm.name} writes no registers; --as {way} is for a model that does")
    if way == "restart":
        return lambda part, label: restarted(lm, part, label, max_tokens)
    if way == "oracle":
        return lambda part, label: decode(lm, part, Oracle, label)
    return _in_one_way(remembering(lm) if way == "remembering" else lm, AUTO)


if __name__ == "__main__":
    sys.exit(told(main))
