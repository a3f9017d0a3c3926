"""The loop of a run: every prompt answered by both sides, timed, scored, and kept at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.bench.pairs import Report, run_pair
from stretto.data.store import Store
from stretto.errors import StrettoError
from stretto.eval.answers import Contestant, Interrupted, answered
from stretto.eval.metrics import figures_of
from stretto.eval.rows import Answered, EvalRow, Side
from stretto.eval.tasks import Item, Prompts, Task
from stretto.params import SamplingParams

if TYPE_CHECKING:
    from stretto.completion import Completion

NUM_WARM = 1
"""Decodes of each side that are not timed, as in the paper: every request is decoded twice and the
second one counts."""


@dataclass(frozen=True)
class Job:
    """What is measured: a task with our side and, if there is one, a baseline to be held against.

    `num_pairs`: timed decodes of each side and prompt; 0 times nothing, and each side decodes once.
    """

    task: Task
    prompts: Prompts
    ours: Contestant
    baseline: Contestant | None
    params: SamplingParams
    num_pairs: int = 1
    keeps_prompts: bool = True


def evaluate(
    job: Job, store: Store[EvalRow], *, process: int, report: Report,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> bool:  # fmt: skip
    """Measures the prompts that `store` has no row of, in order, one request at a time.

    Returns whether all are done: not after Ctrl-C, which gives up the prompt under way.
    """
    size = len(job.prompts.items)
    if len(store):
        report(f"going on after {len(store)} of {size} prompts in {store.path}")
    for number, item in enumerate(job.prompts.items, 1):
        if item.prompt_id in store:
            continue
        try:
            row = measure(job, item, number, process, is_interrupted)
        except Interrupted:
            return False
        store.add(row)
        report(f"prompt {number} of {size}: {_told(row)}")
    return True


def measure(
    job: Job, item: Item, number: int, process: int, is_interrupted: Callable[[], bool]
) -> EvalRow:
    """The row of one prompt. Which side goes first alternates over prompts and pairs. A side that
    fails is not tried again, and the other one then answers once, untimed."""
    sides: dict[Side, Contestant] = {"ours": job.ours}
    if job.baseline is not None:
        sides["baseline"] = job.baseline
    runs: dict[Side, list[Completion]] = {side: [] for side in sides}
    errors: dict[Side, str] = {}

    def answer(side: Side) -> None:
        if side in sides and side not in errors:
            try:
                runs[side].append(sides[side].answer(item.prompt, job.params, is_interrupted))
            except StrettoError as error:
                errors[side] = str(error)

    num_runs = NUM_WARM + job.num_pairs if job.num_pairs else 1
    for pair in range(num_runs):
        if pair and errors:
            break
        run_pair(number + pair, lambda: answer("ours"), lambda: answer("baseline"))
    num_warm = NUM_WARM if job.num_pairs and not errors else num_runs
    rows = {
        side: _row(job, item, found, num_warm) for side, found in runs.items() if side not in errors
    }
    return EvalRow(
        prompt_id=item.prompt_id,
        number=number,
        prompt=item.prompt if job.keeps_prompts else None,
        ours=rows.get("ours"),
        baseline=rows.get("baseline"),
        errors=errors,
        process=process,
    )


def _row(job: Job, item: Item, runs: Sequence[Completion], num_warm: int) -> Answered:
    row = answered(list(runs), num_warm)
    if job.task.score is None:
        return row
    score = job.task.score(item, row.text)
    return row.model_copy(
        update={"score": score.value, "shares": score.shares, "details": score.details}
    )


def _told(row: EvalRow) -> str:
    if row.errors:
        return "; ".join(f"{side} failed: {why}" for side, why in row.errors.items())
    figures = figures_of(row)
    told = [f"{figures['sequential_steps']} steps"]
    if figures["theoretical"] is not None:
        told.append(f"speed-up {figures['theoretical']:.2f} theoretical")
    if figures["realized"] is not None:
        told.append(f"{figures['realized']:.2f} realized")
    if figures["score"] is not None:
        told.append(f"score {figures['score']:g}")
    return ", ".join(told)
