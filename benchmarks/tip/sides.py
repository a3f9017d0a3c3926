"""Sides of a comparison of speed: each with an engine that notes what its passes take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto import LM
from stretto.bench.pairs import bootstrap_median, rounded
from stretto.bench.step import TimedEngine
from stretto.stream import Stream


@dataclass
class Side:
    """An `LM` whose passes are timed. `measured`: a record a pair."""

    name: str
    lm: LM
    measured: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = TimedEngine(self.lm.scheduler.engine)
        self.lm.scheduler.engine = self.engine

    def run(self, streams: Sequence[Stream], num_steps: int | None = None) -> dict[str, Any]:
        """Steps until all streams are done, or so many times; seconds in all and in passes."""
        self.engine.times.clear()
        before = self.lm.scheduler.num_preemptions
        began, steps = time.perf_counter(), []
        while any(not s.request.is_done for s in streams):
            start = time.perf_counter()
            self.lm.scheduler.step()
            steps.append(time.perf_counter() - start)
            if num_steps is not None and len(steps) >= num_steps:
                break
        seconds = time.perf_counter() - began
        in_passes = sum(took for _, took in self.engine.times)
        return {
            "seconds": seconds,
            "pass_seconds": in_passes,
            "books_share": 1 - in_passes / seconds,
            "step_ms": 1000 * statistics.median(steps),
            "passes": len(self.engine.times),
            "rows_a_pass": statistics.fmean(rows for rows, _ in self.engine.times),
            "preemptions": self.lm.scheduler.num_preemptions - before,
        }


def in_turn(pair: int, sides: Sequence[Side]) -> list[Side]:
    """The sides, another one first in each pair."""
    at = pair % len(sides)
    return [*sides[at:], *sides[:at]]


def ratios(
    sides: Sequence[Side], figure: str, over: str, to: Sequence[str]
) -> list[dict[str, Any]]:
    """How many times the `figure` of side `over` that of each other one is: the median over pairs
    with its interval, and the least and the largest."""
    by_name = {side.name: [m[figure] for m in side.measured] for side in sides}
    found = []
    for name in to:
        values = [a / b for a, b in zip(by_name[over], by_name[name], strict=True)]
        interval = bootstrap_median(values, seed=0)
        found.append(
            rounded(
                {
                    "ratio": f"{figure} of {over} / {name}",
                    "median": interval.median,
                    "low": interval.low,
                    "high": interval.high,
                    "least": min(values),
                    "largest": max(values),
                    "pairs": len(values),
                }
            )
        )
    return found
