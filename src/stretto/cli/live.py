"""The live view of `stretto run`: the document fills in, one colour a thread, as threads decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from stretto.cli.output import escaped
from stretto.runtime.events import Denoised, Evicted, ThreadEnd, ThreadStart, Token
from stretto.trace import is_drawn

if TYPE_CHECKING:
    from stretto.runtime.events import Event

COLOURS = ("cyan", "magenta", "green", "yellow", "bright_blue", "bright_red", "bright_green")
REFRESH_S = 0.08
CURSOR = "▌"
MASKED = "░"
"""Stands for a token of a block that is not written yet."""
LET_GO = "dim strike"
"""The style of text that its own thread no longer sees."""
MAX_TOPIC = 24
SPARE_ROWS = 3
"""Screen rows beside the document: two of header, one so that nothing scrolls."""

Piece = tuple[str, str]
"""Text and its style."""


@dataclass
class Voice:
    """A thread as it is shown. `draft` are annotation tokens it drew before any text of its own.

    `block`: ids of a block that is being written, None for what is not yet. `begins` are the
    segments that its text is of and where they begin in it; `gone` those that the thread no longer
    sees.
    """

    name: str
    style: str
    topic: str | None
    text: str = ""
    draft: list[int] = field(default_factory=list)
    children: list[tuple[int, str]] = field(default_factory=list)
    is_open: bool = True
    block: list[int | None] | None = None
    begins: list[tuple[int, int]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def write(self, text: str, segment: int | None = None) -> None:
        """More text, of a segment; by default of the last one."""
        if segment is not None and (not self.begins or self.begins[-1][1] != segment):
            self.begins.append((len(self.text), segment))
        self.text += text

    def pieces(self, start: int, end: int, *, final: bool) -> Iterator[Piece]:
        """`text[start:end]`, struck out where it is gone, unless `final`."""
        if final or not self.gone:
            yield self.text[start:end], self.style
            return
        ends = [*(at for at, _ in self.begins[1:]), len(self.text)]
        for (at, segment), until in zip(self.begins, ends, strict=True):
            style = f"{LET_GO} {self.style}".strip() if segment in self.gone else self.style
            yield self.text[max(start, at) : min(end, until)], style


class LiveDocument:
    """The answer so far from events alone: each thread's text in its place in its parent's."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.voices: dict[str, Voice] = {}
        self.num_tokens = 0
        self.num_steps = 0
        self.num_evicted = 0

    @property
    def num_open(self) -> int:
        """Threads that have not ended, a parent that waits for its children included."""
        return sum(voice.is_open for voice in self.voices.values())

    def take(self, event: Event) -> None:
        match event:
            case ThreadStart():
                number = len(self.voices)
                style = COLOURS[(number - 1) % len(COLOURS)] if number else ""
                self.voices[event.thread] = Voice(event.thread, style, event.topic)
                if event.parent is not None:
                    self.voices[event.parent].children.append((event.at, event.thread))
            case Token():
                voice = self.voices[event.thread]
                voice.write(event.text, event.segment)
                if is_drawn(event.origin) and voice.block is None:
                    self.num_tokens += 1
                    self.num_steps = max(self.num_steps, event.step)
                    if event.markup:
                        voice.draft.append(event.token)
            case ThreadEnd():
                voice = self.voices[event.thread]
                voice.write(event.text)
                voice.is_open = False
            case Denoised():
                self._denoise(event)
            case Evicted():
                self.voices[event.thread].gone.add(event.segment)
                self.num_evicted += event.num_tokens
            case _:
                pass

    def _denoise(self, event: Denoised) -> None:
        voice = self.voices[event.thread]
        if voice.block is None:
            voice.block = [None] * event.length
        for index, token in zip(event.indices, event.tokens, strict=True):
            voice.block[index] = token
        if event.indices:
            self.num_tokens += len(event.indices)
            self.num_steps = max(self.num_steps, event.step)

    def pieces(self, *, final: bool = False) -> Iterator[Piece]:
        """The document in order. Unless `final`, with drafts and with cursors of open threads, and
        a sibling that follows an open one at once begins a line: both grow in place."""
        if self.voices:
            yield from self._pieces(next(iter(self.voices.values())), final)

    def _pieces(self, voice: Voice, final: bool) -> Iterator[Piece]:
        start, before = 0, None
        for at, child in voice.children:
            yield from voice.pieces(start, at, final=final)
            if not final and before is not None and before.is_open and start == at:
                yield "\n", ""
            start, before = at, self.voices[child]
            yield from self._pieces(self.voices[child], final)
        yield from voice.pieces(start, len(voice.text), final=final)
        if final or not voice.is_open:
            return
        if voice.block is not None:
            yield from self._block_pieces(voice.block, voice.style)
            return
        if voice.draft and not voice.text and not voice.children:
            yield self._decode(voice.draft), f"dim {voice.style}".strip()
        yield CURSOR, voice.style

    def _block_pieces(self, block: list[int | None], style: str) -> Iterator[Piece]:
        for is_masked, run in groupby(block, lambda token: token is None):
            tokens = list(run)
            if is_masked:
                yield MASKED * len(tokens), f"dim {style}".strip()
            else:
                yield self._decode([token for token in tokens if token is not None]), style


class LiveView:
    """Shows an answer on a terminal while it decodes, then once and whole, in the same colours.

    With `prints_answer` False only the passing view is shown.
    """

    def __init__(
        self,
        console: Console,
        decode: Callable[[Sequence[int]], str],
        *,
        method: str,
        model: str,
        prints_answer: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.document = LiveDocument(decode)
        self._console = console
        self._method = method
        self._model = escaped(model)
        self._prints_answer = prints_answer
        self._clock = clock
        self._started = clock()
        self._first_token: float | None = None
        self._refreshed = -REFRESH_S
        self._size = console.size
        self._live = self._new_live()

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._live.stop()

    def update(self, events: Sequence[Event], text: str) -> None:
        """Events arrived; redraws if the last drawing is old enough."""
        for event in events:
            self.document.take(event)
        now = self._clock()
        if self._first_token is None and self.document.num_tokens:
            self._first_token = now
        if now - self._refreshed >= REFRESH_S:
            self._refreshed = now
            self._follow_size()
            self._live.update(self.render(), refresh=True)

    def finish(self, text: str) -> None:
        """The view is over; `text` is the whole answer."""
        if not self._prints_answer:
            return
        pieces = list(self.document.pieces(final=True))
        if not "".join(piece for piece, _ in pieces).startswith(text):
            pieces = [(text, "")]
        answer = _assemble(pieces, len(text))
        self._console.print(answer, end="" if text.endswith("\n") else "\n")

    # -- drawing -------------------------------------------------------------------------------

    def render(self) -> Group:
        """Header, threads, and the last screenful of the document."""
        width, height = self._console.size
        rows = max(1, height - SPARE_ROWS)
        body = tail(list(self.document.pieces()), width, rows)
        lines = body.wrap(self._console, width)[-rows:]
        return Group(self._header(), self._threads(), *lines)

    def _header(self) -> Text:
        document, now = self.document, self._clock()
        elapsed_s = f"{now - self._started:.1f} s"
        if self._first_token is None:
            parts = [self._method, "reading the prompt", elapsed_s, self._model]
        else:
            steps, tokens = document.num_steps, document.num_tokens
            decode_s = now - self._first_token
            rate = (tokens - 1) / decode_s if decode_s > 0 else 0.0
            parts = [
                self._method,
                f"{document.num_open} of {len(document.voices)} threads open",
                f"{tokens} tokens in {steps} steps",
                *([f"{document.num_evicted} let go"] if document.num_evicted else []),
                f"{rate:.0f} tokens/s",
                elapsed_s,
                self._model,
            ]
        return Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")

    def _threads(self) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        for voice in self.document.voices.values():
            name = voice.name if voice.topic is None else voice.topic[:MAX_TOPIC]
            mark = "●" if voice.is_open else "✓"
            line.append(f"{mark} {escaped(name)}  ".replace("\n", " "), style=voice.style)
        return line

    def _new_live(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=True)

    def _follow_size(self) -> None:
        """A resized terminal has wrapped the old drawing anew: begin on a clear screen."""
        if self._console.size != self._size:
            self._size = self._console.size
            self._live.stop()
            self._console.clear()
            self._live = self._new_live()
            self._live.start()


def tail(pieces: Sequence[Piece], width: int, rows: int) -> Text:
    """The end of a document, at least `rows` rows of it if there are as many.

    It begins at a line's start, or within a long line at a place that moves in whole steps, so
    that the drawing does not shake as the text grows.
    """
    whole = "".join(text for text, _ in pieces)
    least = len(whole) - rows * width
    start = 0
    if least > 0:
        newline = whole.rfind("\n", 0, least)
        step = rows * width
        start = max(newline + 1, (least // step) * step)
    return _assemble(_skip(pieces, start), len(whole))


def _skip(pieces: Sequence[Piece], start: int) -> Iterator[Piece]:
    for text, style in pieces:
        yield text[start:], style
        start = max(0, start - len(text))


def _assemble(pieces: Iterator[Piece] | Sequence[Piece], length: int) -> Text:
    """The first `length` characters of pieces as one text that cannot steer the terminal."""
    whole = Text()
    for text, style in pieces:
        shown = text[:length]
        length -= len(shown)
        if shown:
            whole.append(escaped(shown), style=style or None)
    return whole
