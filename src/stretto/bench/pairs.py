"""Ratios from interleaved pairs: the median, and a bootstrap 95% interval over the pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Report = Callable[[str], None]
"""Takes a line about progress."""

NUM_RESAMPLES = 10_000
PAUSE_S = 0.2
"""Between two sides of a pair: a pool of threads that has just run spins for a while, and would
take the cores from the other side's."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with the 95% interval `low` to `high` around it."""

    median: float
    low: float
    high: float


def bootstrap_median(values: Sequence[float], seed: int) -> Interval:
    """The median of at least one value; its interval by the percentile bootstrap.

    Deterministic given `seed`. With one value the interval is that value.
    """
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    resamples = data[rng.integers(len(data), size=(NUM_RESAMPLES, len(data)))]
    low, high = np.percentile(np.median(resamples, axis=1), [2.5, 97.5])
    return Interval(float(np.median(data)), float(low), float(high))


def run_pair(pair: int, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
    """Runs both sides of a pair, `first` before `second` in even pairs; results in given order."""
    if pair % 2 == 0:
        one = first()
        return one, second()
    two = second()
    return first(), two


def rested(run: Callable[[], T]) -> T:
    """Runs one side of a pair after `PAUSE_S`."""
    time.sleep(PAUSE_S)
    return run()


def rounded(row: dict[str, Any], digits: int = 5) -> dict[str, Any]:
    """The row with its floats rounded to significant digits, for people and files."""
    return {k: float(f"{v:.{digits}g}") if isinstance(v, float) else v for k, v in row.items()}
