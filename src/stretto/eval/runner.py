"""The loop of a run: every prompt answered by the baseline and all arms, timed, scored, kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from stretto.bench.pairs import Report
from stretto.data.store import Store
from stretto.errors import StrettoError
from stretto.eval.answers import Interrupted, answered
from stretto.eval.job import BASELINE, EVERY, Job, Question
from stretto.eval.metrics import figures_of
from stretto.eval.rows import Answered, EvalRow, Side, row_key
from stretto.eval.together import Meter, answer_together

if TYPE_CHECKING:
    from stretto.completion import Completion

Stores = Mapping[str, Store[EvalRow]]
"""The rows of each arm, by its name."""


def evaluate(
    job: Job, stores: Stores, *, processes: Mapping[str, int], report: Report,
    is_interrupted: Callable[[], bool] = lambda: False, until: int | None = None,
    meters: dict[str, Meter] | None = None,
) -> bool:  # fmt: skip
    """Measures the first `until` prompts, or all, for the arms whose store has no row of them.

    `processes`: of each arm, the number of this process among those that measured it. A prompt's
    rows are on disk when it is done. Returns whether all are: not after Ctrl-C, which gives up
    what is under way. `meters`: takes what passes with many prompts came to, by side.
    """
    size = len(job.prompts.items) * job.num_samples
    missing = _missing(job, stores, until)
    if any(len(store) for store in stores.values()):
        what = "prompts" if job.num_samples == 1 else "answers"
        report(f"going on: {len(missing)} of {size} {what} are to be measured now")

    def keep(question: Question, measured: Measured) -> None:
        rows = rows_of(job, question, measured, processes)
        for name, row in rows.items():
            stores[name].add(row)
        report(f"{_place(job, question)}: {_told(rows)}")

    try:
        if not job.num_pairs:
            for question, answers in answer_together(job, missing, is_interrupted, meters):
                keep(question, Measured.untimed(answers))
            missing = _missing(job, stores, until)
        timer = Timer(job, is_interrupted)
        for question in missing:
            keep(question, timer.measure(question))
    except Interrupted:
        return False
    return True


def _missing(job: Job, stores: Stores, until: int | None) -> list[Question]:
    found = []
    for number, item in enumerate(job.prompts.items[:until], 1):
        for sample in range(job.num_samples):
            key = row_key(item.prompt_id, sample)
            arms = tuple(name for name, store in stores.items() if key not in store)
            if arms:
                found.append(Question(number, item, arms, sample))
    return found


def _place(job: Job, question: Question) -> str:
    place = f"prompt {question.number} of {len(job.prompts.items)}"
    if job.num_samples == 1:
        return place
    return f"{place}, sample {question.sample + 1} of {job.num_samples}"


class Measured:
    """A prompt's decodes by side, in order: the first `num_warm` of a side are not timed. Of a side
    that failed, why."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Completion]] = {}
        self.num_warm: dict[str, int] = {}
        self.errors: dict[str, str] = {}

    @classmethod
    def untimed(cls, answers: Mapping[str, Completion]) -> Measured:
        measured = cls()
        measured.runs = {name: [answer] for name, answer in answers.items()}
        measured.num_warm = dict.fromkeys(answers, 1)
        return measured


class Timer:
    """Decodes prompts one request at a time, and knows who is warm in this process."""

    def __init__(self, job: Job, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        self._job = job
        self._is_interrupted = is_interrupted
        self._is_warm: set[str] = set()

    def measure(self, question: Question) -> Measured:
        """Every side of the question decodes once a pair, and before it is timed once untimed, if
        it is not warm or `warm` is every. Who goes first moves on by one side each prompt and pair.
        A side that fails on a prompt is not tried again there; the others go on as if it had not.
        """
        job, measured = self._job, Measured()
        names = list(job.sides(question.arms))
        measured.runs = {name: [] for name in names}
        cold = [name for name in names if job.warm == EVERY or name not in self._is_warm]
        if job.num_pairs:
            for name in rotated(cold, question.number):
                self._answer(name, question, measured)
        measured.num_warm = {name: len(measured.runs[name]) for name in names}
        for pair in range(max(1, job.num_pairs)):
            for name in rotated(names, question.number + 1 + pair):
                self._answer(name, question, measured)
        if not job.num_pairs:
            measured.num_warm = dict.fromkeys(names, 1)
        return measured

    def _answer(self, name: str, question: Question, measured: Measured) -> None:
        if name in measured.errors:
            return
        job = self._job
        side = job.sides(question.arms)[name]
        try:
            completion = side.answer(
                question.item.prompt, job.params, self._is_interrupted, question.sample
            )
        except StrettoError as error:
            measured.errors[name] = str(error)
            return
        measured.runs[name].append(completion)
        self._is_warm.add(name)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in order, beginning with number `turn` of them, counted in a circle from 0."""
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def rows_of(
    job: Job, question: Question, measured: Measured, processes: Mapping[str, int]
) -> dict[str, EvalRow]:
    """A row of each arm; all have the same answer and times of the baseline."""
    item, errors = question.item, measured.errors
    answers = {
        name: _answered(job, name, question, runs, measured.num_warm[name])
        for name, runs in measured.runs.items()
        if name not in errors
    }
    rows = {}
    for name in question.arms:
        sides: dict[Side, str] = {"ours": name, "baseline": BASELINE}
        rows[name] = EvalRow(
            prompt_id=item.prompt_id,
            number=question.number,
            sample=question.sample,
            prompt=item.prompt if job.keeps_prompts else None,
            ours=answers.get(name),
            baseline=answers.get(BASELINE),
            errors={side: errors[key] for side, key in sides.items() if key in errors},
            process=processes[name],
        )
    return rows


def _answered(
    job: Job, name: str, question: Question, runs: Sequence[Completion], num_warm: int
) -> Answered:
    side = job.sides(question.arms)[name]
    row = answered(runs, num_warm, side.page_size)
    if job.task.score is None:
        return row
    score = job.task.score(question.item, row.text)
    return row.model_copy(
        update={
            "score": score.value,
            "shares": score.shares,
            "details": score.details,
            "vote": score.vote,
        }
    )


def _told(rows: Mapping[str, EvalRow]) -> str:
    """A line about a prompt: of one arm in words, of several a speed-up each."""
    if len(rows) > 1:
        return ", ".join(f"{name} {_speed_up(row)}" for name, row in rows.items())
    (row,) = rows.values()
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


def _speed_up(row: EvalRow) -> str:
    if row.errors:
        return "failed"
    figures = figures_of(row)
    known = [figures[name] for name in ("realized", "theoretical") if figures[name] is not None]
    return f"{known[0]:.2f}" if known else f"{figures['sequential_steps']} steps"
