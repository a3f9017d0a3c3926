"""Dialect `pasta`, written down: annotated text or ids to a trace, and a trace to its text form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stretto.dialects.base import Issue, Parsed, Vocabulary
from stretto.dialects.outline import Block, Part, Promised, Run, Sync, outline
from stretto.dialects.pasta import PastaSession, PastaSettings, child_name
from stretto.dialects.tags import (
    ASYNC,
    ASYNC_END,
    MAX_PROMISED_TOKENS,
    PROMISE,
    PROMISE_END,
    SYNC,
    TAG_FORMS,
    TOKENS,
    Tag,
    id_tags,
    max_units,
    text_tags,
)
from stretto.effects import Cut, Fork, Join, Place
from stretto.recorder import MAIN, OpenThread, Recorder
from stretto.trace import Trace, text_runs


def parse_text(
    text: str, vocabulary: Vocabulary, settings: PastaSettings, prompt: str = ""
) -> Parsed:
    """What an annotated text means. Total: raises for no text that the vocabulary can encode."""
    parts, issues = outline(text_tags(text, settings.unit), len(text))
    replay = Replay(vocabulary.encode(prompt), vocabulary, settings)
    replay.run(
        parts,
        placing(replay, lambda start, end: vocabulary.encode(text[start:end])),
        lambda tag: promise_ids(tag, vocabulary, settings.unit),
    )
    return Parsed(replay.trace(), _rendered(text, parts), in_order(issues + replay.issues))


def parse_ids(
    prompt_ids: Sequence[int], ids: Sequence[int], vocabulary: Vocabulary, settings: PastaSettings
) -> Parsed:
    """What a serialised response means; either layout. `at` of an issue is an index into `ids`.

    Total: any ids of the vocabulary have a meaning.
    """
    tags, unfinished = id_tags(ids, vocabulary, settings.unit)
    parts, issues = outline(tags, len(ids))
    replay = Replay(list(prompt_ids), vocabulary, settings)
    replay.run(
        parts,
        placing(replay, lambda start, end: list(ids[start:end])),
        lambda tag: list(ids[tag.start : tag.end]),
    )
    trace = replay.trace()
    text = "".join(vocabulary.decode(run) for run in text_runs(trace))
    return Parsed(trace, text, in_order(unfinished + issues + replay.issues))


def promise_ids(tag: Tag, vocabulary: Vocabulary, unit: int) -> list[int]:
    """The ids of a promise that stands in a text."""
    control = vocabulary.control
    topic, number = vocabulary.encode(tag.topic), vocabulary.encode(str(tag.length // unit))
    return [control[PROMISE], *topic, control[TOKENS], *number, control[PROMISE_END]]


def in_order(issues: list[Issue]) -> tuple[Issue, ...]:
    return tuple(sorted(issues, key=lambda issue: issue.at))


def _rendered(text: str, parts: list[Part]) -> str:
    """The text without tags, each block's content in its promise's place."""
    pieces = []
    for part in parts:
        source = part.block if isinstance(part, Promised) else part
        if isinstance(source, Run | Block):
            pieces.append(text[source.start : source.end])
    return "".join(pieces)


WriteRun = Callable[[OpenThread, int, int], None]
"""Places a slice of a source, from and to these offsets, on a thread."""


def placing(replay: Replay, ids_of: Callable[[int, int], list[int]]) -> WriteRun:
    """Places a slice's ids as they are."""

    def write(thread: OpenThread, start: int, end: int) -> None:
        for token in ids_of(start, end):
            replay.recorder.place(thread, Place(token))

    return write


class Replay:
    """Drives a recorder through the parts of a source, as decoding would have driven it."""

    def __init__(
        self,
        prompt: list[int],
        vocabulary: Vocabulary,
        settings: PastaSettings,
        role: str = PastaSession.main_role,
    ) -> None:
        self.issues: list[Issue] = []
        self.recorder = Recorder(prompt, role, settings.max_positions)
        self._settings = settings
        self._control = vocabulary.control
        self._main = self.recorder.threads[MAIN]
        self._num_promises = 0
        self._unjoined: list[str] = []

    def run(
        self, parts: list[Part], write: WriteRun, promise_ids: Callable[[Tag], list[int]]
    ) -> None:
        """`write` places runs of text, `promise_ids` gives the ids of a promise."""
        for part in parts:
            match part:
                case Run(start, end):
                    write(self._main, start, end)
                case Promised(tag, block):
                    for token in promise_ids(tag):
                        self.recorder.place(self._main, Place(token, markup=True))
                    self._promise(tag, block, write)
                case Sync():
                    self._sync()

    def trace(self) -> Trace:
        """The trace; parsed threads have not finished for any reason."""
        trace = self.recorder.freeze()
        return replace(trace, threads=tuple(replace(t, finish_reason=None) for t in trace.threads))

    def _promise(self, tag: Tag, block: Block | None, write: WriteRun) -> None:
        self._num_promises += 1
        promise_end = self._main.next_position - 1
        limit = self.recorder.max_positions
        resume, clamped = self._settings.resume(promise_end, tag.length, limit)
        if clamped:
            self.issues.append(Issue("clamped-tokens", tag.start))
        if block is None:
            self.recorder.cut(self._main, Cut(position=resume))
            return
        name = child_name(self._num_promises)
        self._unjoined.append(name)
        fork = Fork(name, inject=(self._control[ASYNC],), resume=resume, topic=tag.topic)
        child = self.recorder.fork(self._main, fork)
        write(child, block.start, block.end)
        if block.closed:
            self.recorder.place(child, Place(self._control[ASYNC_END], markup=True))
        self.recorder.close(child, "stop")
        self.recorder.fed(child, len(child.unfed))

    def _sync(self) -> None:
        joined, self._unjoined = tuple(self._unjoined), []
        join = Join(joined, rebase=self._settings.policy == "overlap")
        self.recorder.join(self._main, join)
        self.recorder.place(self._main, Place(self._control[SYNC], markup=True))


# -- back to text ----------------------------------------------------------------------------------


def to_text(
    trace: Trace, vocabulary: Vocabulary, settings: PastaSettings
) -> tuple[str, dict[tuple[int, int], int]]:
    """The annotated text of a trace, each block right after its promise, and where tokens stand.

    Offsets are in code points and keyed by (segment id, token index). They are exact for control
    tokens, also those that are text; other tokens have the offset of the run they stand in, and
    those of a promise that of its tag. A block without an end gets one.
    """
    writer = TagWriter(vocabulary, settings.unit)
    for segment in trace.response:
        writer.enter(segment.thread)
        for index, (token, markup) in enumerate(zip(segment.tokens, segment.markup, strict=True)):
            writer.write((segment.id, index), token, markup)
    writer.enter(None)
    return "".join(writer.pieces), writer.offsets


class TagWriter:
    """Turns tokens in document order into annotated text."""

    def __init__(self, vocabulary: Vocabulary, unit: int) -> None:
        self.pieces: list[str] = []
        self.offsets: dict[tuple[int, int], int] = {}
        self._vocabulary = vocabulary
        self._unit = unit
        self._names = {i: name for name, i in vocabulary.control.items()}
        self._length = 0
        self._run: list[int] = []
        self._promise: list[int] = []
        self._thread: str | None = None
        self._open_block = False

    def enter(self, thread: str | None) -> None:
        """The tokens that follow are of this thread; None: there are none."""
        if thread == self._thread:
            return
        self._flush()
        if self._open_block:
            self._append(TAG_FORMS[ASYNC_END])
        self._thread, self._open_block = thread, False

    def write(self, key: tuple[int, int], token: int, markup: bool) -> None:
        name = self._names.get(token)
        if self._promise and not markup:
            self._flush()
        if markup and (self._promise or name == PROMISE):
            if not self._promise:
                self._flush()
            self._promise.append(token)
            self.offsets[key] = self._length
            if name == PROMISE_END:
                self._append(self._tag(self._promise))
                self._promise = []
        elif name is not None:
            self._flush()
            self.offsets[key] = self._length
            self._append(self._vocabulary.decode([token]))
            if markup and name in (ASYNC, ASYNC_END):
                self._open_block = name == ASYNC
        else:
            self.offsets[key] = self._length
            self._run.append(token)

    def end(self) -> int:
        """Ends what is being written; the length of the text so far."""
        self._flush()
        return self._length

    def _flush(self) -> None:
        """Ends a run of text. A promise that is not complete is written as what it is so far."""
        ids = self._promise or self._run
        if ids:
            self._append(self._vocabulary.decode(ids))
        self._promise, self._run = [], []

    def _append(self, text: str) -> None:
        self.pieces.append(text)
        self._length += len(text)

    def _tag(self, ids: list[int]) -> str:
        split = ids.index(self._vocabulary.control[TOKENS])
        topic = self._vocabulary.decode(ids[1:split])
        quote = "'" if '"' in topic else '"'
        number = _tokens_value(self._vocabulary.decode(ids[split + 1 : -1]), self._unit)
        return f'<promise topic={quote}{topic}{quote} tokens="{number}"/>'


def _tokens_value(units: str, unit: int) -> str:
    """The `tokens` value of a number of units: valid in text if and only if the number is."""
    significant = units.lstrip("0")
    if not significant or len(significant) > 4:
        return units
    tokens, largest = int(significant) * unit, max_units(unit) * unit
    return str(min(tokens, MAX_PROMISED_TOKENS) if tokens <= largest else tokens)
