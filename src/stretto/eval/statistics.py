"""Means over prompts with bootstrap intervals. Arithmetic on numbers; knows no rows.

All intervals are percentile bootstraps over prompts at 95 %, functions of their values and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import InvalidInput

Values = NDArray[np.float64]
NUM_RESAMPLES = 10_000
CHUNK = 1 << 22
"""Resampled numbers held at once."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval; all None where there is nothing to take it of."""

    value: float | None
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


NOTHING = Estimate(None, None, None)


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean of logs. Raises `InvalidInput` for no values, or one that is not positive."""
    if not values or not min(values) > 0:
        raise InvalidInput(f"a geometric mean is of positive numbers, got {list(values)[:5]}")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def arithmetic_mean(values: Sequence[float]) -> float:
    if not values:
        raise InvalidInput("a mean is of at least one number, got none")
    return math.fsum(values) / len(values)


def estimate_geometric(values: Sequence[float], seed: int) -> Estimate:
    """The geometric mean of positive values, and its interval. Raises as `geometric_mean`."""
    if not values:
        return NOTHING
    value = geometric_mean(values)
    low, high = _interval(np.log(np.asarray(values, dtype=np.float64)), seed)
    return Estimate(value, math.exp(low), math.exp(high))


def estimate_mean(values: Sequence[float], seed: int) -> Estimate:
    """The arithmetic mean, and its interval."""
    if not values:
        return NOTHING
    low, high = _interval(np.asarray(values, dtype=np.float64), seed)
    return Estimate(arithmetic_mean(values), low, high)


def estimate_quotient(above: Sequence[float], below: Sequence[float], seed: int) -> Estimate:
    """The sum of `above` by the sum of `below` (never negative), and its interval: both numbers of
    a prompt are drawn together. Resamples whose `below` are all 0 are left out."""
    if not sum(below):
        return NOTHING
    data = np.stack([np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)], 1)
    means = np.concatenate(list(_resampled_means(data, seed)))
    means = means[means[:, 1] > 0]
    low, high = np.percentile(means[:, 0] / means[:, 1], [2.5, 97.5])
    return Estimate(math.fsum(above) / math.fsum(below), float(low), float(high))


def paired_difference(a: Sequence[float], b: Sequence[float], seed: int) -> Estimate:
    """The mean of a - b over the same prompts, and its interval: both sides of a prompt are drawn
    together."""
    return estimate_mean([x - y for x, y in zip(a, b, strict=True)], seed)


def paired_ratio(a: Sequence[float], b: Sequence[float], seed: int) -> Estimate:
    """The geometric mean of a / b over the same prompts, and its interval."""
    return estimate_geometric([x / y for x, y in zip(a, b, strict=True)], seed)


def resampled(
    size: int, seed: int, figure: Callable[[NDArray[np.int64]], float], num_resamples: int
) -> tuple[float, float]:
    """The 95 % interval of a figure of prompts, called with the drawn indices of each resample."""
    rng = np.random.default_rng(seed)
    found = [figure(rng.integers(size, size=size)) for _ in range(num_resamples)]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def _interval(data: Values, seed: int) -> tuple[float, float]:
    means = np.concatenate(list(_resampled_means(data, seed)))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _resampled_means(data: Values, seed: int) -> Iterator[Values]:
    rng = np.random.default_rng(seed)
    size, left = len(data), NUM_RESAMPLES
    while left:
        now = min(left, max(1, CHUNK // size))
        yield data[rng.integers(size, size=(now, size))].mean(axis=1)
        left -= now
