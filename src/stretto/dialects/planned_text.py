"""Dialect `planned`, read: annotated text or ids to a trace. `planned_write` writes it down.

In text a span may stand right after its promise or after its round's plan: the trace is the same,
and so is the order of tokens, a round's main text before its spans.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stretto.dialects.base import Issue, Parsed, Vocabulary
from stretto.dialects.outline import Block, Part, Promised, Run, Sync, outline
from stretto.dialects.pasta_text import in_order, promise_ids
from stretto.dialects.planned import PLANNED_FORMS, PlannedSession, PlannedSettings
from stretto.dialects.planned_masks import PAD
from stretto.dialects.tags import ASYNC, ASYNC_END, SYNC, Tag, id_tags, text_tags
from stretto.effects import Join, Place
from stretto.recorder import MAIN, OpenThread, Recorder
from stretto.trace import Trace

_PAD = re.compile(re.escape(PLANNED_FORMS[PAD]))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stretch of text, `source[start:end]`: a run, a literal tag, or a `[PAD]`."""

    kind: str
    start: int
    end: int


Pieces = Callable[[int, int], list[Piece]]
"""A stretch of a source, from and to these offsets, in pieces."""
Ids = Callable[[int, int], list[int]]
"""The ids of a slice of a source."""


def parse_text(
    text: str, vocabulary: Vocabulary, settings: PlannedSettings, prompt: str = ""
) -> Parsed:
    """What an annotated text means. Total: raises for no text that the vocabulary can encode."""
    tags = list(text_tags(text, settings.unit))

    def pads(start: int, end: int) -> Iterator[tuple[int, int]]:
        return (found.span() for found in _PAD.finditer(text, start, end))

    source = Source(
        tags,
        len(text),
        _pieces(tags, pads),
        ids=lambda start, end: vocabulary.encode(text[start:end]),
        promise=lambda tag: promise_ids(tag, vocabulary, settings.unit),
        text=lambda start, end: text[start:end],
    )
    return _parse(source, vocabulary.encode(prompt), vocabulary, settings)


def parse_ids(
    prompt_ids: Sequence[int], ids: Sequence[int], vocabulary: Vocabulary, settings: PlannedSettings
) -> Parsed:
    """What a serialised response means; either layout. `at` of an issue is an index into `ids`.

    Total: any ids of the vocabulary have a meaning.
    """
    tags, unfinished = id_tags(ids, vocabulary, settings.unit)
    pad = vocabulary.control[PAD]

    def pads(start: int, end: int) -> Iterator[tuple[int, int]]:
        return ((i, i + 1) for i in range(start, end) if ids[i] == pad)

    source = Source(
        tags,
        len(ids),
        _pieces(tags, pads),
        ids=lambda start, end: list(ids[start:end]),
        promise=lambda tag: list(ids[tag.start : tag.end]),
        text=lambda start, end: vocabulary.decode(ids[start:end]),
        async_size=1,
    )
    parsed = _parse(source, list(prompt_ids), vocabulary, settings)
    return replace(parsed, issues=in_order([*unfinished, *parsed.issues]))


@dataclass(frozen=True, slots=True)
class Source:
    """An annotated text or a run of ids, with what `_parse` asks of it: its well-formed tags, its
    length, a stretch in pieces, the ids of a run and of a promise, and a slice as text."""

    tags: list[Tag]
    length: int
    pieces: Pieces
    ids: Ids
    promise: Callable[[Tag], list[int]]
    text: Callable[[int, int], str]
    async_size: int = len(PLANNED_FORMS[ASYNC])


def _parse(
    source: Source, prompt: list[int], vocabulary: Vocabulary, settings: PlannedSettings
) -> Parsed:
    parts, issues = outline(source.tags, source.length)
    replay = Replay(prompt, vocabulary, settings, source)
    replay.run(parts)
    rendered = "".join(_rendered(source, parts))
    return Parsed(replay.trace(), rendered, in_order([*issues, *replay.issues]))


def _rendered(source: Source, parts: list[Part]) -> Iterator[str]:
    """The text without tags and fillers, each block's content in its promise's place."""
    for part in parts:
        match part:
            case Run(start, end):
                yield source.text(start, end)
            case Promised(_, Block(start, end)):
                pieces = source.pieces(start, end)
                for run in _joined(pieces):
                    yield source.text(run.start, run.end) if run.kind != PAD else ""


def _pieces(tags: list[Tag], pads: Callable[[int, int], Iterator[tuple[int, int]]]) -> Pieces:
    """Cuts stretches at the tags that stand in them, which are literal, and at fillers."""
    starts = [tag.start for tag in tags]

    def between(start: int, end: int) -> Iterator[Piece]:
        at = start
        for left, right in pads(start, end):
            yield from (Piece("run", at, left) for _ in range(at < left))
            yield Piece(PAD, left, right)
            at = right
        if at < end:
            yield Piece("run", at, end)

    def pieces(start: int, end: int) -> list[Piece]:
        found: list[Piece] = []
        at = start
        for tag in tags[bisect_left(starts, start) : bisect_left(starts, end)]:
            found += between(at, tag.start)
            found.append(Piece("tag", tag.start, tag.end))
            at = tag.end
        return [*found, *between(at, end)]

    return pieces


def _joined(pieces: list[Piece]) -> Iterator[Piece]:
    """Literal tags and the runs around them as one run each; fillers apart."""
    open_run: Piece | None = None
    for piece in pieces:
        if piece.kind == PAD:
            if open_run is not None:
                yield open_run
            open_run = None
            yield piece
        else:
            start = piece.start if open_run is None else open_run.start
            open_run = Piece("run", start, piece.end)
    if open_run is not None:
        yield open_run


class Replay:
    """Drives a recorder through the parts of a source, as decoding would have driven it.

    A round's blocks are held back until its plan is over.
    """

    def __init__(
        self, prompt: list[int], vocabulary: Vocabulary, settings: PlannedSettings, source: Source
    ) -> None:
        self.issues: list[Issue] = []
        self.recorder = Recorder(prompt, PlannedSession.main_role, settings.max_positions)
        self._settings = settings
        self._control = vocabulary.control
        self._source = source
        self._main = self.recorder.threads[MAIN]
        self._blocks: list[tuple[int, Tag, Block]] = []

    def run(self, parts: list[Part]) -> None:
        num_promises = 0
        for part in parts:
            match part:
                case Run(start, end):
                    self._text(start, end)
                case Promised(tag, block):
                    num_promises += 1
                    for token in self._source.promise(tag):
                        self.recorder.place(self._main, Place(token, markup=True))
                    if block is not None:
                        self._blocks.append((num_promises, tag, block))
                case Sync():
                    self.recorder.join(self._main, Join(self._spans()))
                    self.recorder.place(self._main, Place(self._control[SYNC], markup=True))
        self._spans()

    def trace(self) -> Trace:
        """The trace; parsed threads have not finished for any reason."""
        trace = self.recorder.freeze()
        return replace(trace, threads=tuple(replace(t, finish_reason=None) for t in trace.threads))

    def _text(self, start: int, end: int) -> None:
        """Text on main, which has no place there."""
        for piece in self._source.pieces(start, end):
            if piece.kind != "tag":
                self.issues.append(Issue("text-outside-span", piece.start))
        for token in self._source.ids(start, end):
            self.recorder.place(self._main, Place(token))

    def _spans(self) -> tuple[str, ...]:
        """Writes the round's spans, and closes them; their names."""
        blocks, self._blocks = self._blocks, []
        spans = [self._span(number, tag, block) for number, tag, block in blocks]
        for span in spans:
            self.recorder.close(span, "stop")
            self.recorder.fed(span, len(span.unfed))
        return tuple(span.name for span in spans)

    def _span(self, number: int, tag: Tag, block: Block) -> OpenThread:
        recorder, main, control = self.recorder, self._main, self._control
        ids = list(self._content(block))
        length = max(tag.length, len(ids))
        position = main.next_position
        effect = self._settings.span(control, number, length, position, tag.topic)
        span = recorder.open_block(main, effect)
        recorder.place(span, Place(control[ASYNC], "injected", markup=True))
        for token, is_filler in ids:
            recorder.place(span, Place(token, markup=is_filler))
        if block.closed:
            recorder.place(span, Place(control[ASYNC_END], "injected", markup=True))
        span.own.num_passes = length
        if len(ids) > tag.length:
            at = block.start - self._source.async_size
            self.issues.append(Issue("span-too-long", at))
        return span

    def _content(self, block: Block) -> Iterator[tuple[int, bool]]:
        """The ids of a block's content, and which of them are fillers."""
        for piece in _joined(self._source.pieces(block.start, block.end)):
            if piece.kind == PAD:
                yield self._control[PAD], True
            else:
                yield from ((token, False) for token in self._source.ids(piece.start, piece.end))
