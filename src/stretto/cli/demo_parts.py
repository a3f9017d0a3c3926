"""What demos have in common: options, a model that comes with Stretto, a view of it at work."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from stretto.cli.output import interruptible, is_live, write_json, write_line
from stretto.errors import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.completion import Completion
    from stretto.lm import LM
    from stretto.runtime.events import Event
    from stretto.stream import Stream

POOL_SLOTS = 4096
LONGEST_WAIT_S = 10.0

Index = Annotated[int, typer.Option(help="Which of the problems.", metavar="N", min=0)]
Split = Annotated[str, typer.Option(help="Of the problems: train, valid or test.")]
Seed = Annotated[int, typer.Option(help="Of the problems.", metavar="N")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to write at most.", metavar="N", min=1)]
Engine = Annotated[str, typer.Option(help="auto, hf, packed, fused or flex.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No live view, no summary.")]


class Board(Protocol):
    """What is there so far. `take` brings it up to date and says whether anything changed;
    `whole_lines` is for `Lines`."""

    def take(self, events: Sequence[Event]) -> bool: ...
    def whole_lines(self, is_over: bool) -> list[str]: ...


class View(Protocol):
    """Shows a board: `update` after each pass that changed it, `finish` once at the end."""

    def update(self) -> None: ...
    def finish(self) -> None: ...


class NoView:
    def update(self) -> None: ...
    def finish(self) -> None: ...


class Lines:
    """Lines on stdout as soon as they are whole; none is changed afterwards. `whole_lines`: all
    that are so far; given True, all there are."""

    def __init__(self, whole_lines: Callable[[bool], Sequence[str]]) -> None:
        self._whole_lines = whole_lines
        self._num_written = 0

    def update(self) -> None:
        self._write(self._whole_lines(False))

    def finish(self) -> None:
        self._write(self._whole_lines(True))

    def _write(self, lines: Sequence[str]) -> None:
        for line in lines[self._num_written :]:
            write_line(line)
        self._num_written = max(self._num_written, len(lines))


def load(model: str, engine: str, *, own: str, dialect: str, lacks: str, docs: str) -> LM:
    """The model. `own`: the name of the one that comes with Stretto; `docs`: the page that tells
    how such a one is made; `lacks`: what a model of another dialect has none of. Raises
    `ModelUnavailable` where the own one is missing, `InvalidInput` for another dialect."""
    from stretto.errors import InvalidInput, ModelUnavailable
    from stretto.lm import LM
    from stretto.models.shipped import shipped

    if model == own and model not in shipped():
        raise ModelUnavailable(
            f"model {own!r} does not come with this version; train one ({docs}) and give "
            "its folder with --model"
        )
    lm = LM.load(model, engine=engine, pool_slots=POOL_SLOTS)
    if lm.card.dialect != dialect:
        raise InvalidInput(
            f"{model} writes dialect {lm.card.dialect}, which has no {lacks}; give a model of "
            f"dialect {dialect}"
        )
    return lm


def pause_between(pace: float) -> float:
    """Seconds between what is shown at so many a second, `LONGEST_WAIT_S` at most; of pace 0
    none."""
    return min(1 / pace, LONGEST_WAIT_S) if pace else 0.0


def play(
    lm: LM, stream: Stream, board: Board, view: View, is_interrupted: Callable[[], bool]
) -> bool:
    """Decodes to the end, or until Ctrl-C: then False."""
    request = stream.request
    try:
        while not request.is_done and not is_interrupted():
            lm.step(request)
            if board.take(request.log.take()):
                view.update()
    finally:
        stream.close()
        board.take(request.log.take())
        view.finish()
    return not is_interrupted()


def show(
    lm: LM,
    stream: Stream,
    board: Board,
    live: Callable[..., View],
    *,
    prompt: str,
    head: Sequence[str],
    pace: float,
    summarise: Callable[[Completion], None],
    facts: Callable[[Completion], dict[str, Any]],
    as_json: bool,
    quiet: bool,
) -> None:
    """Decodes in view and tells of the end: `summarise`, or with `as_json` only `facts`.

    The view is nothing with `as_json` or `quiet`, on a terminal what `live` makes of a console,
    the board, the prompt and what waits between drawings, `pace` a second; elsewhere `head` and
    lines. Raises `typer.Exit` after Ctrl-C.
    """
    if as_json or quiet:
        view: View = NoView()
    elif is_live(sys.stdout):
        from rich.console import Console

        console, pause_s = Console(file=sys.stdout, highlight=False), pause_between(pace)
        view = live(console, board, prompt, wait=lambda: time.sleep(pause_s))
    else:
        for line in head:
            write_line(line)
        view = Lines(board.whole_lines)
    with interruptible() as pressed:
        finished = play(lm, stream, board, view, pressed)
    if as_json:
        write_json(facts(stream.completion))
    elif not quiet:
        summarise(stream.completion)
    if not finished:
        raise typer.Exit(INTERRUPTED)
