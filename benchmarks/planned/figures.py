"""Figures of cells over the same problems, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from answers import Decoded
from cells import REFERENCE, Cell, is_less

from stretto.eval.statistics import (
    NOTHING,
    Estimate,
    estimate_geometric,
    estimate_mean,
    paired_difference,
    paired_ratio,
)

SEED = 0
QUALITIES = ("right", "parts")


@dataclass(frozen=True)
class Measured:
    """A cell's answers by problem."""

    cell: Cell
    rows: Mapping[str, Decoded]

    def of(self, figure: Callable[[Decoded], float]) -> list[float]:
        """A figure of each answer, in the order of the problems' names."""
        return [figure(self.rows[name]) for name in sorted(self.rows)]

    def only(self, names: Sequence[str] | set[str]) -> Measured:
        """Its answers to these problems."""
        return Measured(self.cell, {name: self.rows[name] for name in names if name in self.rows})


def percent(quality: str) -> Callable[[Decoded], float]:
    """A quality of an answer, `right`, `parts` or `sums`, in percent."""
    return lambda row: float(100 * getattr(row, quality))


def seconds(row: Decoded) -> float:
    return row.seconds


def decode_s(row: Decoded) -> float:
    return row.decode_s


def steps(row: Decoded) -> float:
    return float(row.steps)


def points_over(own: Measured, other: Measured, quality: str) -> Estimate:
    """Points of quality more than another cell, over the problems that both have answered."""
    one, two = paired(own, other)
    return paired_difference(one.of(percent(quality)), two.of(percent(quality)), SEED)


def times_faster(
    own: Measured, other: Measured, took: Callable[[Decoded], float] = seconds
) -> Estimate:
    """`times_less` of a time; nothing for a cell that was answered in another process."""
    if is_less(own.cell) or is_less(other.cell):
        return NOTHING
    return times_less(own, other, took)


def times_less(own: Measured, other: Measured, took: Callable[[Decoded], float]) -> Estimate:
    """What the other took by what the own one took, over the problems that both have answered:
    geometric mean. Nothing if an answer took none of it."""
    one, two = (measured.of(took) for measured in paired(own, other))
    if not min([*one, *two], default=0) > 0:
        return NOTHING
    return paired_ratio(two, one, SEED)


def paired(own: Measured, other: Measured) -> tuple[Measured, Measured]:
    """Both with the problems alone that both have answered."""
    both = set(own.rows) & set(other.rows)
    return own.only(both), other.only(both)


def mean_quality(measured: Measured, quality: str) -> Estimate:
    return estimate_mean(measured.of(percent(quality)), SEED)


def by_cell(cells: Sequence[Cell], rows: Sequence[Decoded]) -> dict[str, Measured]:
    """The answers of cells by name, those alone that there are."""
    found: dict[str, dict[str, Decoded]] = {}
    for row in rows:
        found.setdefault(row.cell, {})[row.prompt_id] = row
    return {c.name: Measured(c, found[c.name]) for c in cells if c.name in found}


def of_cells(cells: Sequence[Cell], rows: Sequence[Decoded]) -> list[Measured]:
    """The answers of cells, where all have the problems of the reference; others are left out."""
    found = by_cell(cells, rows)
    if REFERENCE not in found:
        return []
    names = set(found[REFERENCE].rows)
    return [measured for measured in found.values() if set(measured.rows) == names]


def table_row(
    measured: Measured, reference: Measured, trained: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Qualities and `sums` in percent, seconds and steps of an answer, and all but `sums` against
    the reference: points more, times faster (`decode_speedup`: without the prompt), and times fewer
    steps, which is what a machine would gain for which more rows a pass cost no more. Arms that
    learnt less are answered in another process, so that nothing is told of their time. `trained`:
    of arms by name, what training took."""
    estimates: dict[str, Estimate] = {
        **{quality: mean_quality(measured, quality) for quality in QUALITIES},
        "sums": mean_quality(measured, "sums"),
        "seconds": NOTHING
        if is_less(measured.cell)
        else estimate_geometric(measured.of(seconds), SEED),
        "steps": estimate_mean(measured.of(steps), SEED),
        **{f"{q}_over_reference": points_over(measured, reference, q) for q in QUALITIES},
        "speedup": times_faster(measured, reference),
        "decode_speedup": times_faster(measured, reference, decode_s),
        "fewer_steps": times_less(measured, reference, steps),
    }
    took = trained.get(measured.cell.arm, {})
    row: dict[str, Any] = {
        "cell": measured.cell.name,
        "group": measured.cell.group,
        "knob": measured.cell.knob,
        "problems": len(measured.rows),
        "unfinished": sum(r.finish != "stop" for r in measured.rows.values()),
        "with_issues": sum(bool(r.issues) for r in measured.rows.values()),
        "tokens": estimate_mean(measured.of(lambda r: r.completion_tokens), SEED).value,
        "training_tokens": took.get("tokens"),
        "training_seconds": took.get("seconds"),
    }
    for name, estimate in estimates.items():
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return row


def on_frontier(rows: Sequence[Mapping[str, Any]], quality: str) -> list[str]:
    """The cells that no other one beats in both time and quality, fastest first."""
    best, found = float("-inf"), []
    for row in sorted(rows, key=lambda r: (r["seconds"], -r[quality])):
        if row[quality] > best:
            best = row[quality]
            found.append(row["cell"])
    return found
