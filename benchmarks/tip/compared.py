"""Arms of the TIP experiment, from their rows: what each is right in, and what it holds.

A problem is what is drawn anew for an interval, with all training seeds that answered it: its value
is the mean over them. Beside the interval stand the least and the largest mean of a seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from answered import PAGES, Solved

from stretto.bench.pairs import rounded
from stretto.eval.statistics import Estimate, estimate_mean, paired_difference, paired_ratio

BOTH = ("program", "tree")
"""Where old steps are needed: on these the claims are made."""


@dataclass(frozen=True)
class Arm:
    """One way to answer, by training seed: the rows of each."""

    name: str
    seeds: Mapping[str, Sequence[Solved]]

    def of(self, keep: Callable[[Solved], bool]) -> Arm:
        """The same with fewer problems; a seed without any is left out."""
        kept = {seed: [row for row in rows if keep(row)] for seed, rows in self.seeds.items()}
        return Arm(self.name, {seed: rows for seed, rows in kept.items() if rows})

    @property
    def rows(self) -> list[Solved]:
        return [row for rows in self.seeds.values() for row in rows]

    def by_problem(self, value: Callable[[Solved], float]) -> dict[str, float]:
        """Of each problem the mean over seeds."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            found.setdefault(row.problem, []).append(value(row))
        return {name: statistics.fmean(values) for name, values in found.items()}

    def estimate(self, value: Callable[[Solved], float]) -> Estimate:
        return estimate_mean(list(self.by_problem(value).values()), seed=0)

    def spread(self, value: Callable[[Solved], float]) -> tuple[float, float]:
        """The least and the largest mean of a seed."""
        means = [statistics.fmean(map(value, rows)) for rows in self.seeds.values()]
        return min(means), max(means)


def accuracy(row: Solved) -> float:
    """In percent."""
    return 100.0 * row.is_right


def live(row: Solved) -> float:
    return row.generated_mean


def length(row: Solved) -> float:
    return row.num_tokens


def saved(row: Solved) -> float:
    """Percent less than what dense decoding of as many tokens holds of them."""
    dense = row.dense_generated_mean
    return 100 * (1 - row.generated_mean / dense) if row.num_tokens else 0.0


# -- tables ----------------------------------------------------------------------------------------


def table_row(arm: Arm, reference: Arm | None) -> dict[str, Any]:
    """A row of a table. `reference`: Dense+GRPO, to which differences are paired by problem;
    `problems_paired` are those of both."""
    row: dict[str, Any] = {"arm": arm.name, "seeds": len(arm.seeds)}
    row["problems"] = len(arm.by_problem(accuracy))
    for name, value in (("accuracy", accuracy), ("live", live), ("saved", saved)):
        row |= _told(name, arm.estimate(value))
        row[f"{name}_least"], row[f"{name}_most"] = arm.spread(value)
    every = arm.rows
    ended = [r for r in every if r.finish == "stop"]
    row["accuracy_if_ended"] = statistics.fmean(map(accuracy, ended)) if ended else None
    row["cut"] = 100 * (1 - len(ended) / len(every))
    row["exact"] = 100 * statistics.fmean(r.is_exact for r in every)
    row["tokens"] = statistics.fmean(r.num_tokens for r in every)
    row["live_peak"] = statistics.fmean(r.generated_peak for r in every)
    row["with_prompt"] = statistics.fmean(r.live_mean for r in every)
    row["with_prompt_peak"] = statistics.fmean(r.live_peak for r in every)
    row |= _pages(every)
    over = None
    if reference is not None:
        over = difference(arm, reference, accuracy)
        row["problems_paired"] = over.problems
    else:
        row["problems_paired"] = None
    row |= _told("accuracy_over_dense", None if over is None else over.estimate)
    return rounded(row)


def _pages(rows: Sequence[Solved]) -> dict[str, float | None]:
    """Means of what pages hold; None where single tokens were hidden."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    found = {n: mean([getattr(r, n) for r in rows]) for n in ("reserved_mean", "reserved_peak")}
    for page in PAGES:
        slots = [r.slots.get(str(page)) for r in rows]
        for end, place in (("", 2), ("_peak", 3), ("_with_prompt", 0)):
            found[f"slots_{page}{end}"] = mean([s and s[place] for s in slots])
    return found


def _told(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    if estimate is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


# -- two arms --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """A figure of two arms with its interval. `problems`: those that both have answered;
    `left_out`: of these without a ratio, for one side is 0."""

    estimate: Estimate
    problems: int
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        told = {**self.estimate.to_json(), "problems": self.problems}
        return told | ({"left_out": self.left_out} if self.left_out else {})


def difference(a: Arm, b: Arm, value: Callable[[Solved], float]) -> Paired:
    """The mean of a - b, over the problems of both."""
    one, other = _paired(a, b, value)
    return Paired(paired_difference(one, other, seed=0), len(one))


def ratio(a: Arm, b: Arm, value: Callable[[Solved], float]) -> Paired:
    """The geometric mean of a / b over the problems of both."""
    one, other = _paired(a, b, value)
    positive = [pair for pair in zip(one, other, strict=True) if min(pair) > 0]
    above, below = [list(side) for side in zip(*positive, strict=True)] if positive else ([], [])
    return Paired(paired_ratio(above, below, seed=0), len(one), len(one) - len(positive))


def _paired(a: Arm, b: Arm, value: Callable[[Solved], float]) -> tuple[list[float], list[float]]:
    one, other = a.by_problem(value), b.by_problem(value)
    both = [name for name in one if name in other]
    return [one[name] for name in both], [other[name] for name in both]
