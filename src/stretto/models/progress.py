"""Progress of long work: bars on a terminal, plain lines elsewhere, always on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], None]
"""`report(task, done, total)`: `task` is a readable label; both counts share the task's unit.

A `total` of 0 means that it is not known."""

PLAIN_LINE_EVERY_S = 2.0


def silent(task: str, done: int, total: int) -> None:
    """A `Report` that shows nothing."""


@contextmanager
def shown_on_stderr() -> Iterator[Report]:
    """Yield a `Report` that draws bars if stderr is a terminal and prints lines otherwise.

    Nothing is written before the first report. rich honours NO_COLOR by itself.
    """
    if sys.stderr is None:
        yield silent
    elif sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield _PlainLines()


@contextmanager
def _bars() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    tasks: dict[str, TaskID] = {}
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(task: str, done: int, total: int) -> None:
            known_total = total if total > 0 else None
            if task not in tasks:
                tasks[task] = progress.add_task(task, total=known_total)
            progress.update(tasks[task], completed=done, total=known_total)

        yield report


class _PlainLines:
    """One line when a task starts, one when it ends, and at most one per interval between."""

    def __init__(self) -> None:
        self._last: tuple[str, float] = ("", 0.0)

    def __call__(self, task: str, done: int, total: int) -> None:
        name, when = self._last
        if name == task and done < total and time.monotonic() - when < PLAIN_LINE_EVERY_S:
            return
        self._last = (task, time.monotonic())
        share = f": {100 * done // total}%" if total > 0 else ""
        print(f"{task}{share}", file=sys.stderr, flush=True)
