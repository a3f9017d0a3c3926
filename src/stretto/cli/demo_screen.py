"""A demo's view on a terminal, whatever it shows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live

from stretto.cli.output import escaped


class Screen(ABC):
    """A `demo_parts.View` that is drawn anew at each update. `wait` is called after each drawing
    but the last."""

    def __init__(self, console: Console, prompt: str, *, wait: Callable[[], None]) -> None:
        self._console = console
        self._prompt = escaped(prompt)
        self._wait = wait
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    @abstractmethod
    def render(self) -> Group:
        """What the screen shows now."""

    def update(self) -> None:
        self._live.update(self.render(), refresh=True)
        self._wait()

    def finish(self) -> None:
        self._live.update(self.render(), refresh=True)
        self._live.stop()
