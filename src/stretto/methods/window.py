"""Sliding window: a row sees the last `budget` tokens, and the whole prompt if that is pinned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stretto.methods.evicting import EvictingMethod, Moment, Page


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(EvictingMethod):
    """Hides the oldest page first. With a pinned prompt, the window is what it leaves."""

    rule: ClassVar[str] = "window"

    def victims(self, pages: Sequence[Page], moment: Moment) -> Iterator[Page]:
        return iter(pages)
