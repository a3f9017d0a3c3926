"""Answers in every way to some test problems, one at a time, timed; each once, however often run.

    python benchmarks/planned/answers.py --cells knobs --first 0 --num 20 --out answers/part-0.jsonl

All models are held by one process. Every problem is answered in all ways before the next one is,
each time beginning with another way, so that what a machine does meanwhile falls on all of them.
`--cells compute=0.5` answers in the plain ways of arms that were trained on less. Models are in
`ARM/model` of the folder that this is run in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from cells import CELLS, Cell, compute_cells

from stretto import LM, SamplingParams
from stretto.completion import Completion
from stretto.data.rows import Row, prompt_id
from stretto.data.store import Store
from stretto.eval.multipart import Problem, problems
from stretto.eval.task_multipart import score
from stretto.eval.tasks import Item

MAX_TOKENS = 700
"""Of an answer, plans and fillers included."""
POOL_SLOTS = 2048
TEST_SEED = 1
WARM = "(1) Count the letters of the word lemon."


class Decoded(Row):
    """An answer. `right`: whether its total is; `parts`: share of parts with the right result;
    `sums`: whether the total is that of the results it states. `steps`: sequential ones."""

    kind: ClassVar[str] = "decoded"
    cell: str
    prompt_id: str
    text: str
    finish: str
    right: float
    parts: float
    sums: float
    steps: int
    completion_tokens: int
    control_tokens: int
    seconds: float
    decode_s: float
    peak_slots: int
    issues: list[str]

    @property
    def key(self) -> str:
        return f"{self.cell}/{self.prompt_id}"


def decoded(cell: Cell, problem: Problem, completion: Completion) -> Decoded:
    told = score(Item(problem.prompt, problem), completion.text)
    return Decoded(
        cell=cell.name,
        prompt_id=prompt_id(problem.prompt),
        text=completion.text,
        finish=completion.finish_reason,
        right=told.value,
        parts=told.shares["parts_right"],
        sums=told.shares["sums_own_results"],
        steps=completion.usage.sequential_steps,
        completion_tokens=completion.usage.completion_tokens,
        control_tokens=completion.usage.control_tokens,
        seconds=round(completion.timing.total_s, 6),
        decode_s=round(completion.timing.decode_s, 6),
        peak_slots=completion.live_kv.pool_peak_slots,
        issues=[issue.code for issue in completion.issues],
    )


def answer(lm: LM, cell: Cell, prompt: str) -> Completion:
    params = SamplingParams(max_tokens=MAX_TOKENS, **cell.params)
    return lm.submit(prompt, params, method=cell.method).finish()


def warm(lm: LM, cell: Cell) -> None:
    """A short answer, spans of one pass, so that nothing is done for the first time later."""
    params = SamplingParams(max_tokens=32)
    if lm.card.variant is not None:
        params = SamplingParams(max_tokens=MAX_TOKENS, threshold=0.0)
    lm.submit(WARM, params, method=cell.method).finish()


def answer_all(cells: Sequence[Cell], asked: Sequence[Problem], out: Path) -> None:
    """Fills the file with the answers that it lacks."""
    lms = {arm: load(arm) for arm in dict.fromkeys(cell.arm for cell in cells)}
    for cell in {cell.arm: cell for cell in cells}.values():
        warm(lms[cell.arm], cell)
    with Store(out, Decoded) as store:
        for number, problem in enumerate(asked):
            at = number % len(cells)
            for cell in (*cells[at:], *cells[:at]):
                if f"{cell.name}/{prompt_id(problem.prompt)}" not in store:
                    completion = answer(lms[cell.arm], cell, problem.prompt)
                    store.add(decoded(cell, problem, completion))
            print(f"{number + 1} of {len(asked)} problems", file=sys.stderr, flush=True)


def load(arm: str) -> LM:
    return LM.load(Path(arm) / "model", dtype="float32", pool_slots=POOL_SLOTS)


def cells_of(text: str) -> tuple[Cell, ...]:
    kind, _, share = text.partition("=")
    return compute_cells((share,)) if kind == "compute" else CELLS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="knobs", help="knobs, or compute=SHARE")
    parser.add_argument("--first", type=int, default=0, help="how many problems to pass over")
    parser.add_argument("--num", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    asked = problems(TEST_SEED, given.first + given.num, "test")[given.first :]
    answer_all(cells_of(given.cells), asked, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
