"""What judge `likelihood` makes of its measurements: comparisons of two answers on one scale.

A verdict holds what was measured, so verdicts on several runs can be put on one scale afterwards.
Pure arithmetic, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from stretto.eval.judges.standard import Point, length_slope


@dataclass(frozen=True, slots=True)
class Gap:
    """Of two answers to a prompt, the first less the second: `value` in mean log-prob a token,
    `log_length` in the logarithm of the counted tokens, `brevity` in what each pays for being
    shorter than the other."""

    value: float
    log_length: float
    brevity: float

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> Self | None:
        """Out of the details of a verdict. None where no two answers were measured: they are the
        same, or one is empty."""
        a, b, brevity = (_number(details, name) for name in ("a", "b", "brevity"))
        if a is None or b is None or brevity is None:
            return None
        log_length = _number(details, "log_length")
        if log_length is None:
            log_length = _recovered(details, a - b)
        return None if log_length is None else cls(a - b, log_length, brevity)


@dataclass(frozen=True, slots=True)
class Scale:
    """`slope`: how much log-prob rises with log length. `spread`: the root mean square of what is
    left of the gaps without it."""

    slope: float
    spread: float

    @classmethod
    def of(cls, gaps: Sequence[Gap]) -> Self:
        """Of all gaps that are to be on it."""
        pairs = [[Point(gap.value, gap.log_length), Point(0.0, 0.0)] for gap in gaps]
        slope = length_slope(pairs)
        left = [gap.value - slope * gap.log_length for gap in gaps]
        return cls(slope, math.sqrt(sum(d * d for d in left) / len(left)) if left else 0.0)

    def rest(self, gap: Gap) -> float:
        """The gap in log-prob, its length taken out."""
        return gap.value - self.slope * gap.log_length

    def preference(self, gap: Gap, *, is_charged: bool = True) -> float:
        """From -1 to 1: tanh(d/s + e), d being `rest`, s `spread` and e `brevity`, which is left
        out where it `is_charged` not."""
        fluency = self.rest(gap) / self.spread if self.spread else 0.0
        return math.tanh(fluency + (gap.brevity if is_charged else 0.0))


def _recovered(details: Mapping[str, Any], value: float) -> float | None:
    """The difference in log length in a verdict from before it was kept, from what it took out."""
    slope, rest = _number(details, "length_slope"), _number(details, "gap")
    return (value - rest) / slope if slope and rest is not None else None


def _number(details: Mapping[str, Any], name: str) -> float | None:
    value = details.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
