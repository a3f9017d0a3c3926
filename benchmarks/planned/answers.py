"""Answers in every way to some problems, one at a time, timed; each once, however often run.

    python benchmarks/planned/answers.py --cells knobs --first 0 --num 20 --out answers/part-0.jsonl

All models are held by one process. Every problem is answered in all ways before the next one is,
in an order drawn for that problem, so that what a machine does meanwhile, and what ran before,
falls on all of them. A problem that was not finished when the process ended is answered anew in all
ways; the answers that it had are put aside in a file that ends in `.unfinished`. `--cells
compute=0.5` answers in the plain ways of arms that were trained on less; `--cells chosen=FILE` in
those that `choose.py` chose, and in those that the autoregressive arms are compared with besides;
`--cells costly` in some ways at the cost of a larger model (`costly.py`).
Models are in `ARM/model` of the folder that this is run in.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from cells import CELLS, COSTLY, KINDS, LONGER, REFERENCE, THREADS, Cell, compute_cells
from costly import made_costly

from stretto import LM, SamplingParams
from stretto.completion import Completion
from stretto.data.rows import Row, prompt_id
from stretto.data.store import Store, line_of
from stretto.eval.multipart import Problem, problems
from stretto.eval.restricted import blind
from stretto.eval.task_multipart import score
from stretto.eval.tasks import Item
from stretto.files import write_atomically

MAX_TOKENS = 900
"""Of an answer, plans and fillers included: enough for promises of twice the length."""
POOL_SLOTS = 2048
SEEDS = {"valid": 2, "test": 1}
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
        return key_of(self.cell, self.prompt_id)


def key_of(cell: str, prompt: str) -> str:
    return f"{cell}/{prompt}"


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


def params_of(cell: Cell) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, **cell.params)


def answer(lm: LM, cell: Cell, prompt: str) -> Completion:
    """`lm` is the arm's; a cell without joins is answered as by `stretto eval run --no-joins`."""
    own = lm if cell.joins else blind(lm)
    return own.submit(prompt, params_of(cell), method=cell.method).finish()


def warm(lm: LM, cell: Cell) -> None:
    """A short answer, spans of one pass, so that nothing is done for the first time later."""
    params = SamplingParams(max_tokens=32)
    if lm.card.variant is not None:
        params = SamplingParams(max_tokens=MAX_TOKENS, threshold=0.0)
    lm.submit(WARM, params, method=cell.method).finish()


def ordered(cells: Sequence[Cell], prompt: str) -> list[Cell]:
    """The ways in the order of this problem: a permutation drawn from its name alone."""
    return random.Random(f"order/{prompt}").sample(list(cells), len(cells))


def answer_all(
    cells: Sequence[Cell], asked: Sequence[Problem], out: Path, *, is_costly: bool = False
) -> None:
    """Fills the file with the answers that it lacks. `is_costly`: at the cost of a larger model."""
    if num := drop_unfinished(cells, out):
        print(f"{num} answers to an unfinished problem are given anew", file=sys.stderr)
    lms = {arm: load(arm) for arm in dict.fromkeys(cell.arm for cell in cells)}
    if is_costly:
        lms = dict(zip(lms, made_costly(list(lms.values())), strict=True))
    for cell in {cell.arm: cell for cell in cells}.values():
        warm(lms[cell.arm], cell)
    with Store(out, Decoded) as store:
        for number, problem in enumerate(asked, 1):
            name = prompt_id(problem.prompt)
            if key_of(cells[0].name, name) not in store:
                for cell in ordered(cells, name):
                    store.add(decoded(cell, problem, answer(lms[cell.arm], cell, problem.prompt)))
            print(f"{number} of {len(asked)} problems", file=sys.stderr, flush=True)


def drop_unfinished(cells: Sequence[Cell], out: Path) -> int:
    """Puts the answers aside of problems that were not answered in all ways; how many."""
    if not out.exists():
        return 0
    with Store(out, Decoded) as store:
        rows = list(store.rows.values())
        done = [all(key_of(c.name, row.prompt_id) in store for c in cells) for row in rows]
    lines = [line_of(row.model_dump(exclude_none=True)) for row in rows]
    rest = [line for line, whole in zip(lines, done, strict=True) if not whole]
    if rest:
        with out.with_suffix(".unfinished").open("ab") as file:
            file.writelines(rest)
        kept = (line for line, whole in zip(lines, done, strict=True) if whole)
        write_atomically(out, b"".join(kept))
    return len(rest)


def load(arm: str, pool_slots: int = POOL_SLOTS) -> LM:
    return LM.load(Path(arm) / "model", dtype="float32", pool_slots=pool_slots)


def cells_of(text: str) -> tuple[Cell, ...]:
    """The ways that `--cells` names."""
    kind, _, value = text.partition("=")
    if kind == "compute":
        return compute_cells((value,))
    if kind == "chosen":
        chosen = json.loads(Path(value).read_text())
        goals = [*chosen["goals"].values(), *chosen["costly"].values()]
        planned = (name for own in goals for name in own.values())
        names = {REFERENCE, LONGER, THREADS, *planned}
    elif kind == "costly":
        names = set(COSTLY)
    else:
        return CELLS
    return tuple(cell for cell in CELLS if cell.name in names)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--cells", default="knobs", help="knobs, compute=SHARE, chosen=FILE or costly"
    )
    made.add_argument("--split", choices=sorted(SEEDS), default="test")
    made.add_argument("--first", type=int, default=0, help="how many problems to pass over")
    made.add_argument("--num", type=int, required=True)
    made.add_argument("--out", type=Path, required=True)
    return made


def main() -> int:
    given = parser().parse_args()
    found = problems(SEEDS[given.split], given.first + given.num, given.split, kinds=KINDS)
    asked, is_costly = found[given.first :], given.cells == "costly"
    answer_all(cells_of(given.cells), asked, given.out, is_costly=is_costly)
    return 0


if __name__ == "__main__":
    sys.exit(main())
