"""Length control and standardisation of scores. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A score and the logarithm of its answer's length."""

    value: float
    log_length: float


RIDGE = 1.0
"""Added to the spread of log lengths: a few answers say little about length, thousands a lot."""


def length_slope(groups: Sequence[Sequence[Point]], *, ridge: float = RIDGE) -> float:
    """How much the score rises with log length within a group (answers to one prompt).

    The pooled within-group least-squares slope, shrunk towards 0 by `ridge`: every group is centred
    on its own means, so that prompts whose answers are long and likely do not count. 0 where
    lengths do not vary.
    """
    above, below = 0.0, ridge
    for group in groups:
        if len(group) < 2:
            continue
        mean_x = sum(p.log_length for p in group) / len(group)
        mean_y = sum(p.value for p in group) / len(group)
        above += sum((p.log_length - mean_x) * (p.value - mean_y) for p in group)
        below += sum((p.log_length - mean_x) ** 2 for p in group)
    return above / below if below > 0 else 0.0


def adjusted(point: Point, slope: float) -> float:
    """The score at log length 0, if it depends on length by `slope`."""
    return point.value - slope * point.log_length


def standardised(points: Sequence[Point | None], slope: float) -> list[float | None]:
    """Adjusted scores of one group with mean 0 and (population) deviation 1; all 0 where they do
    not differ, None where there is no score."""
    values = [adjusted(p, slope) for p in points if p is not None]
    if not values:
        return [None for _ in points]
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    if spread < 1e-9:
        return [None if p is None else 0.0 for p in points]
    return [None if p is None else (adjusted(p, slope) - mean) / spread for p in points]
