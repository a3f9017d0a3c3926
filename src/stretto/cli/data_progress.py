"""Progress of the verbs of `stretto data`: one line that changes on a terminal, else a line every
few seconds, always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from stretto.cli.output import is_live, one_line, say

LIVE_EVERY_S = 0.2
PLAIN_EVERY_S = 10.0


class Progress:
    """Shows what `update` is told, not too often. Used with `with`, which clears a live line."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._is_live = is_live(sys.stderr)
        self._every_s = LIVE_EVERY_S if self._is_live else PLAIN_EVERY_S
        self._last = time.monotonic() - (self._every_s if self._is_live else 0)
        self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear()

    def is_due(self) -> bool:
        """Whether an update would be shown now; it need not be worded before."""
        return not self._quiet and time.monotonic() - self._last >= self._every_s

    def update(self, text: str) -> None:
        if not self.is_due():
            return
        self._last = time.monotonic()
        if self._is_live:
            self._clear()
            print(one_line(text)[:78], end="", file=sys.stderr, flush=True)
            self._is_shown = True
        else:
            say(text)

    def step(self, text: str) -> None:
        """Of work whose steps are few: each has a line of its own where lines stay."""
        if self._is_live:
            self.update(text)
        elif not self._quiet:
            say(text)

    def note(self, text: str) -> None:
        """A line that stays, shown at once."""
        self._clear()
        say(text)

    def _clear(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_shown = False
