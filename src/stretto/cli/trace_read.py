"""Reading the file that `stretto run --trace` writes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from stretto.cli.inputs import read_text
from stretto.cli.trace_file import FORMAT, VERSION
from stretto.errors import InvalidInput
from stretto.idset import IdSet
from stretto.trace import Kind, Origin, Segment, Thread, Trace

MAX_BYTES = 256 << 20


class _Part(BaseModel):
    """What is needed of a part of the file; all else in it is left alone."""

    model_config = ConfigDict(strict=True, frozen=True)


class SegmentPart(_Part):
    id: int
    thread: str
    kind: Kind
    role: str
    sees: list[int]
    tokens: list[str]
    positions: list[int]
    token_ids: list[int]
    origins: list[Origin]
    markup: list[bool]
    steps: list[int | None]
    num_passes: int = 0

    @model_validator(mode="after")
    def _is_whole(self) -> SegmentPart:
        columns = (self.positions, self.token_ids, self.origins, self.markup, self.steps)
        if not self.tokens or any(len(column) != len(self.tokens) for column in columns):
            raise ValueError("its tokens, positions, origins, markup and steps differ in number")
        return self


class ThreadPart(_Part):
    id: str
    parent: str | None
    topic: str | None
    finish_reason: str


class EventPart(_Part):
    type: str
    thread: str = ""
    text: str = ""
    step: int = 0


class FilePart(_Part):
    format: Literal["stretto-trace"]
    version: Literal[1]
    method: str
    model: str
    segments: list[SegmentPart]
    threads: list[ThreadPart]
    events: list[EventPart]

    @model_validator(mode="after")
    def _hangs_together(self) -> FilePart:
        names = {thread.id for thread in self.threads}
        if unknown := {t.parent for t in self.threads if t.parent is not None} - names:
            raise ValueError(f"thread {min(unknown)!r} is a parent and not in `threads`")
        for number, segment in enumerate(self.segments):
            if segment.id != number or segment.thread not in names:
                raise ValueError(f"segment {number} has id {segment.id}, thread {segment.thread!r}")
            if any(not 0 <= k < len(self.segments) for k in segment.sees):
                raise ValueError(f"segment {number} sees one that is not there")
        return self


@dataclass(frozen=True)
class Recorded:
    """An answer as its trace file has it.

    `texts`: what each token shows as, one list a segment: its text, or an annotation's own form.
    `placed`: the step during which each response token was placed, in the order of events.
    """

    method: str
    model: str
    trace: Trace
    texts: tuple[tuple[str, ...], ...]
    placed: tuple[int, ...]


def read_recorded(file: str) -> Recorded:
    """The answer in a trace file (`-`: stdin). Raises `InvalidInput` for what is no such file."""
    where = "standard input" if file == "-" else ascii(file)
    document = _parse(read_text(file, MAX_BYTES), where)
    try:
        found = FilePart.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise InvalidInput(
            f"{where} is a trace file that is damaged{f' at {place}' if place else ''}: {reason}; "
            "write it anew with `stretto run --trace FILE`"
        ) from None
    return Recorded(
        found.method,
        found.model,
        _trace_of(found),
        _texts_of(found),
        tuple(_placed_at(found.events)),
    )


def _parse(text: str, where: str) -> dict[str, Any]:
    hint = "give a file that `stretto run --trace FILE` wrote"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{where} is not JSON; {hint}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidInput(f"{where} is no trace file; {hint}")
    if document.get("version") != VERSION:
        raise InvalidInput(
            f"{where} is a trace file of version {document.get('version')!a}, and this Stretto "
            f"reads version {VERSION}; {hint}"
        )
    return document


def _placed_at(events: Sequence[EventPart]) -> Iterator[int]:
    """The step during which each token was placed: one that waited was drawn before."""
    clock = 0
    for event in events:
        clock = max(clock, event.step)
        if event.type == "token":
            yield clock


def _trace_of(found: FilePart) -> Trace:
    segments = tuple(
        Segment(
            id=s.id,
            thread=s.thread,
            kind=s.kind,
            role=s.role,
            sees=IdSet(s.sees),
            tokens=tuple(s.token_ids),
            positions=tuple(s.positions),
            origins=tuple(s.origins),
            markup=tuple(s.markup),
            steps=tuple(s.steps),
            num_passes=s.num_passes,
        )
        for s in found.segments
    )
    threads = tuple(Thread(t.id, t.parent, t.topic, t.finish_reason) for t in found.threads)
    return Trace(segments, threads)


def _texts_of(found: FilePart) -> tuple[tuple[str, ...], ...]:
    """Text as the events have it, where characters of several tokens are whole."""
    written: dict[str, list[str]] = defaultdict(list)
    for event in found.events:
        if event.type == "token":
            written[event.thread].append(event.text)
    own: dict[str, list[SegmentPart]] = defaultdict(list)
    for segment in found.segments:
        if segment.origins[0] != "prompt":
            own[segment.thread].append(segment)
    texts = {s.id: tuple(s.tokens) for s in found.segments}
    for name, segments in own.items():
        if sum(len(s.tokens) for s in segments) != len(written[name]):
            continue  # tokens that were written over have no event each
        told = iter(written[name])
        for s in segments:
            pairs = zip(s.tokens, s.markup, strict=True)
            texts[s.id] = tuple(
                token if markup else text
                for (token, markup), text in zip(pairs, told, strict=False)
            )
    return tuple(texts[s.id] for s in found.segments)
