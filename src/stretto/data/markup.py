"""Annotated text of dialect pasta as text: written, taken apart, mended. No tokenizer needed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.dialects.outline import Part, Promised, Run, Sync, outline
from stretto.dialects.tags import MAX_PROMISED_TOKENS, round_up, text_tags

UNIT = 10
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A promise and what was written for it; `content` is None where nothing was."""

    topic: str
    tokens: int
    content: str | None


def write_chunk(topic: str, tokens: int, content: str) -> str:
    """A promise with its block right after it. `topic` has no line break, and no double quote if
    a model is to learn it: it could not draw one."""
    mark = "'" if '"' in topic else '"'
    return f'<promise topic={mark}{topic}{mark} tokens="{tokens}"/><async>{content}</async>'


def promised(num_tokens: int, unit: int = UNIT) -> int:
    """The length to promise for a chunk of so many tokens: rounded up to a multiple of `unit`."""
    return min(max(round_up(num_tokens, unit), unit), MAX_PROMISED_TOKENS)


def holds_tags(text: str) -> bool:
    """Whether a text without annotations has something in it that would be read as one."""
    return next(text_tags(text, UNIT), None) is not None


def stripped(annotated: str) -> str:
    """The text without annotations, each chunk in its promise's place."""
    return "".join(annotated[start:end] for start, end in _kept(annotated))


def chunks_of(annotated: str, unit: int = UNIT) -> list[Chunk]:
    """The promises of an annotated text, in order, their lengths in whole `unit`s."""
    return [
        Chunk(
            part.tag.topic,
            part.tag.length,
            None if part.block is None else annotated[part.block.start : part.block.end],
        )
        for part in _parts(annotated, unit)
        if isinstance(part, Promised)
    ]


def relengthed(annotated: str, count: Callable[[str], int], unit: int = UNIT) -> str:
    """The same annotations in their usual form, each promise of the length that `count` gives its
    chunk, rounded up. A promise without a chunk is left out."""
    pieces = []
    for part in _parts(annotated):
        match part:
            case Run(start, end):
                pieces.append(annotated[start:end])
            case Sync():
                pieces.append("<sync/>")
            case Promised(tag, block) if block is not None:
                content = annotated[block.start : block.end]
                pieces.append(write_chunk(tag.topic, promised(count(content), unit), content))
    return "".join(pieces)


def transplanted(annotated: str, response: str) -> str | None:
    """The tags of `annotated` in `response`, if their texts differ in whitespace alone; else None.

    A tag goes where as many characters that are no whitespace stand before it. Of the whitespace
    there it keeps the side that it was on; where that does not say, a tag that opens goes behind
    it and any other before it.
    """
    text = stripped(annotated)
    if text == response:
        return annotated
    if _SPACE.sub("", text) != _SPACE.sub("", response):
        return None
    places = _places(response)
    num_solid = [0, *itertools.accumulate(not c.isspace() for c in text)]
    pieces, at = [], 0
    for offset, tag in _tags(annotated):
        start, end = places[num_solid[offset]]
        is_behind = text[max(offset - 1, 0) : offset].isspace()
        is_before = text[offset : offset + 1].isspace()
        if is_behind == is_before:
            is_behind = tag.startswith(("<promise", "<async"))
        place = max(end if is_behind else start, at)
        pieces += [response[at:place], tag]
        at = place
    return "".join([*pieces, response[at:]])


def _places(text: str) -> list[tuple[int, int]]:
    """Of each number of solid characters, where they end and where the next one stands."""
    solid = [i for i, c in enumerate(text) if not c.isspace()]
    ends = [0, *(i + 1 for i in solid)]
    return list(zip(ends, [*solid, len(text)], strict=True))


def _tags(annotated: str) -> Iterator[tuple[int, str]]:
    """Each tag of main's and its offset in the stripped text, where blocks are in promises'
    places."""
    offset = 0
    for part in _parts(annotated):
        match part:
            case Run(start, end):
                offset += end - start
            case Sync():
                yield offset, "<sync/>"
            case Promised(tag, block):
                yield offset, annotated[tag.start : tag.end]
                if block is not None:
                    yield offset, "<async>"
                    offset += block.end - block.start
                    yield offset, "</async>"


def _kept(annotated: str) -> Iterator[tuple[int, int]]:
    for part in _parts(annotated):
        source = part.block if isinstance(part, Promised) else part
        if source is not None and not isinstance(source, Sync):
            yield source.start, source.end


def _parts(annotated: str, unit: int = UNIT) -> list[Part]:
    return outline(text_tags(annotated, unit), len(annotated))[0]
