"""Rows of the TIP experiment: an answer to a problem, whether it is right, and what it held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from stretto.completion import Completion
from stretto.data.rows import Row, read_rows
from stretto.problems import Problem, parse_sizes, problems
from stretto.trace import Trace, live_tokens

PAGES = (3, 9, 16)
"""Page sizes that slots are told for."""


class Solved(Row):
    """An answer. `label`: how it was decoded. `live_*` are tokens that a token of the answer sees,
    itself included; with `generated` those of the prompt are left out. `slots`: by page size what
    the pages of these tokens hold, each segment on pages of its own: mean, peak, and both without
    the prompt; empty, as `reserved_*` are, of a method that hides single tokens. `method`: with all
    settings. `text`: as it was written, registers included."""

    kind: ClassVar[str] = "solved"
    label: str
    problem: str
    task: str
    size: int
    method: str
    is_right: bool
    is_exact: bool
    finish: str
    num_prompt_tokens: int
    num_tokens: int
    live_mean: float
    live_peak: int
    generated_mean: float
    generated_peak: int
    reserved_mean: float | None = None
    reserved_peak: int | None = None
    slots: dict[str, tuple[float, int, float, int]]
    text: str

    @property
    def key(self) -> str:
        return f"{self.label}/{self.problem}"

    @property
    def dense_generated_mean(self) -> float:
        """What `generated_mean` is with nothing let go of, at the same length."""
        return (self.num_tokens + 1) / 2


class Timed(Row):
    """A set of answers that were decoded together: seconds by the clock, tokens drawn."""

    kind: ClassVar[str] = "timed"
    label: str
    part: str
    num_answers: int
    num_tokens: int
    seconds: float

    @property
    def key(self) -> str:
        return f"{self.label}/{self.part}"


def solved(
    label: str, problem: Problem, completion: Completion, *, has_pages: bool = True
) -> Solved:
    """The row of a completion. One that was cut short is wrong. Without `has_pages` nothing is told
    of pages: each token is a segment, and would be counted as a page."""
    text, live, trace = completion.annotated, completion.live_kv, completion.trace
    ended = completion.finish_reason == "stop"
    return Solved(
        label=label,
        problem=problem.id,
        task=problem.task,
        size=problem.size,
        method=completion.method,
        is_right=ended and problem.check(text),
        is_exact=ended and problem.first_wrong(text) is None,
        finish=completion.finish_reason,
        num_prompt_tokens=sum(map(len, trace.prompt)),
        num_tokens=trace.num_tokens,
        live_mean=_digits(live.mean),
        live_peak=live.peak,
        generated_mean=_digits(live.generated_mean),
        generated_peak=live.generated_peak,
        reserved_mean=_digits(live.pool_mean_slots) if has_pages else None,
        reserved_peak=live.pool_peak_slots if has_pages else None,
        slots={str(page): slots_of(trace, page) for page in PAGES} if has_pages else {},
        text=text,
    )


def _digits(value: float) -> float:
    return float(f"{value:.9g}")


def slots_of(trace: Trace, page: int) -> tuple[float, int, float, int]:
    """Slots of the pages that hold what a token of the answer sees, itself included: mean and peak,
    and both without the prompt's pages. Zeros for an empty answer."""
    live = live_tokens(trace, page)
    return _digits(live.mean), live.peak, _digits(live.generated_mean), live.generated_peak


def read_solved(paths: Iterable[Path]) -> list[Solved]:
    """The rows of files, in order."""
    return [row for path in paths for row in read_rows(path, Solved)]


def problems_of(
    tasks: Sequence[str], sizes: Sequence[str], num: int, split: str
) -> dict[tuple[str, str], list[Problem]]:
    """By task and sizes `num` problems of a split, sizes in turn."""
    return {
        (task, size): list(problems(task, parse_sizes(size), num, split=split))
        for task in tasks
        for size in sizes
    }
