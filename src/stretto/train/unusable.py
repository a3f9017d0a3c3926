"""Rows that no example can be made of, and why: counted and kept by whoever gathers examples."""

from __future__ import annotations

from typing import Final

from stretto.errors import InvalidInput

SPAN_TOO_LONG: Final = "span-too-long"
"""The parser's issue of a block that is longer than its promise."""


class Unusable(InvalidInput):
    """A row that no example can be made of; `reason` in short."""

    reason = "not-written-by-a-runtime"


class TooLong(Unusable):
    """A response whose positions do not fit the model; `num_positions` it would take."""

    reason = "too-long"

    def __init__(self, num_positions: int, limit: int) -> None:
        super().__init__(
            f"the response reaches position {num_positions - 1} and the model has {limit} "
            "positions; leave it out"
        )
        self.num_positions = num_positions


class SpanTooLong(Unusable):
    """A block that is longer than its promise."""

    reason = SPAN_TOO_LONG


class WindowTooSmall(Unusable):
    """A response that is longer than the window that it is to be written in."""

    reason = "longer-than-window"
