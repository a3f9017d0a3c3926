"""Plans and spans as masks turn into words, from events alone, and how a terminal shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.text import Text

from stretto.cli.demo_screen import Screen
from stretto.cli.live import MASKED
from stretto.cli.output import escaped
from stretto.recorder import MAIN
from stretto.runtime.events import Denoised, ThreadEnd, ThreadStart, Token
from stretto.trace import is_drawn

if TYPE_CHECKING:
    from stretto.runtime.events import Event

Decode = Callable[[Sequence[int]], str]
COLOURS = ("cyan", "magenta", "green", "yellow", "bright_blue", "bright_red")
MAX_TOPIC = 20
SPARE_ROWS = 4
"""Screen rows beside prompt, plans and spans."""


@dataclass
class Span:
    """A planned part. `places`: its tokens, None where nothing is written yet; `text` is what it
    says, once it is done. Steps are of its first and last pass, None before."""

    topic: str | None
    places: list[int | None] = field(default_factory=list)
    text: str = ""
    num_passes: int = 0
    first_step: int | None = None
    last_step: int | None = None
    is_done: bool = False


@dataclass
class Round:
    """A plan, its ids as the model drew them, and the spans that it planned."""

    plan: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class SpanBoard:
    """The rounds so far. `decode`: text of ids; `pad`: the id that fills what a span has too much
    of, and is not shown. `num_steps`: those of plans, `num_planned`, and those of spans."""

    def __init__(self, decode: Decode, pad: int) -> None:
        self._decode = decode
        self._pad = pad
        self._spans: dict[str, Span] = {}
        self.rounds: list[Round] = [Round()]
        self.num_steps = 0
        self.num_planned = 0

    @property
    def spans(self) -> list[Span]:
        return list(self._spans.values())

    @property
    def num_written(self) -> int:
        """Tokens of the text so far: those of spans, fillers aside. One after the other they take
        as many steps."""
        places = (token for span in self.spans for token in span.places)
        return sum(token is not None and token != self._pad for token in places)

    def take(self, events: Sequence[Event]) -> bool:
        """Brings the board up to date; whether anything on it changed."""
        return bool(sum(self._take(event) for event in events))

    def _take(self, event: Event) -> bool:
        match event:
            case ThreadStart() if event.parent is not None:
                self._spans[event.thread] = span = Span(event.topic)
                self.rounds[-1].spans.append(span)
            case Token() if event.thread == MAIN:
                self._plan(event)
            case Token() | ThreadEnd() if event.thread in self._spans:
                self._spans[event.thread].text += event.text
                self._spans[event.thread].is_done |= isinstance(event, ThreadEnd)
            case Denoised():
                self._write(event)
            case _:
                return False
        return True

    def _plan(self, event: Token) -> None:
        """What main writes after its spans begins the next plan."""
        if self.rounds[-1].spans:
            self.rounds.append(Round())
        self.rounds[-1].plan.append(event.token)
        if is_drawn(event.origin):
            self.num_planned += 1
            self.num_steps = max(self.num_steps, event.step)

    def _write(self, event: Denoised) -> None:
        span = self._spans[event.thread]
        if not event.pass_number:
            span.places = [None] * event.length
            return
        for index, token in zip(event.indices, event.tokens, strict=True):
            span.places[index] = token
        span.num_passes = event.pass_number
        span.first_step = event.step if span.first_step is None else span.first_step
        span.last_step = event.step
        self.num_steps = max(self.num_steps, event.step)

    def plan_text(self, planned: Round) -> str:
        """A plan as it is written in files, without what steers a terminal."""
        return escaped(self._decode(planned.plan))

    def pieces(self, span: Span) -> Iterator[tuple[str, bool]]:
        """A span from left to right: text, and whether it stands for what is not written yet."""
        for is_masked, run in groupby(span.places, lambda token: token is None):
            tokens = list(run)
            if is_masked:
                yield MASKED * len(tokens), True
            else:
                yield self._decode([t for t in tokens if t is not None and t != self._pad]), False

    def whole_lines(self, is_over: bool) -> list[str]:
        """A line for each plan that has ended and each span that is done, up to the first that is
        not; all of them when all is over."""
        number, lines = 0, list[str]()
        for planned in self.rounds:
            if not planned.plan or not (planned.spans or is_over):
                return lines
            lines.append(f"plan  {' '.join(self.plan_text(planned).split())}")
            for span in planned.spans:
                if not (span.is_done or is_over):
                    return lines
                number += 1
                passes = f"{len(span.places)} places, {span.num_passes} passes"
                text = "".join(text for text, _ in self.pieces(span))
                topic = escaped(span.topic or "")
                lines.append(
                    f"span {number}  {topic} ({passes}): {' '.join(escaped(text).split())}"
                )
        return lines

    def to_json(self) -> list[dict[str, Any]]:
        """The rounds in order, each its plan and its spans."""
        return [
            {
                "plan": self._decode(planned.plan),
                "spans": [
                    {
                        "topic": span.topic, "length": len(span.places), "text": span.text,
                        "passes": span.num_passes, "first_step": span.first_step,
                        "last_step": span.last_step,
                    }
                    for span in planned.spans
                ],
            }
            for planned in self.rounds
            if planned.plan
        ]  # fmt: skip


class LiveSpans(Screen):
    """A board on a terminal, drawn anew at each pass. `wait` is called after each drawing."""

    def __init__(
        self, console: Console, board: SpanBoard, prompt: str, *, wait: Callable[[], None]
    ) -> None:
        self._board = board
        super().__init__(console, prompt, wait=wait)

    def render(self) -> Group:
        """The prompt, the last screenful of plans and spans, and the counter."""
        width, height = self._console.size
        prompt = Text(self._prompt, style="bold").wrap(self._console, width)
        body = [line for part in self._parts() for line in part.wrap(self._console, width)]
        room = max(1, height - SPARE_ROWS)
        kept = body[-max(1, room - len(prompt)) :]
        return Group(*prompt[: max(0, room - len(kept))], Text(), *kept, Text(), self._counter())

    def _parts(self) -> Iterator[Text]:
        number = 0
        for planned in self._board.rounds:
            if planned.plan:
                yield Text(self._board.plan_text(planned), style="dim")
            for span in planned.spans:
                yield self._span(span, COLOURS[number % len(COLOURS)])
                number += 1

    def _span(self, span: Span, colour: str) -> Text:
        topic = escaped(span.topic or "")
        head = topic if len(topic) <= MAX_TOPIC else f"{topic[: MAX_TOPIC - 1]}…"
        line = Text(f"{head}: ", style=f"bold {colour}")
        for text, is_masked in self._board.pieces(span):
            line.append(escaped(text).strip("\n"), style=f"dim {colour}" if is_masked else colour)
        return line

    def _counter(self) -> Text:
        board = self._board
        words = f"{board.num_steps} passes; one token after the other {board.num_written}"
        return Text(words, style="bold", no_wrap=True, overflow="ellipsis")
