"""The annotator `structure`: promises what its form shows to be parts, as a baseline.

It sees what APAR and Skeleton-of-Thought see: sections, list items, paragraphs. It does not ask
whether one part needs another, which is what the other annotators are for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Literal

from stretto.data.annotators import Annotation, Refusal
from stretto.data.markup import UNIT, promised, write_chunk
from stretto.data.topics import clean_topic, numbered, topic_of
from stretto.data.units import Unit, cut_units
from stretto.dialects.pasta_masks import MAX_TOPIC_TOKENS
from stretto.errors import InvalidInput
from stretto.params import SamplingParams

MIN_TOKENS = 20
"""A promise costs main about 7 steps, so shorter chunks are grouped."""
PROMISE_STEPS = 8
MAX_GROUP_TOPICS = 3
MAX_GROUPS = 32
"""Of one run of siblings."""
MAX_PROMISES = SamplingParams().max_forks
"""Of a response: what the runtime forks at most."""
CONCLUSION = re.compile(
    r"\W*(?:in (?:conclusion|summary|short|closing)|to (?:conclude|sum up|summari[sz]e)|overall|"
    r"altogether|all in all|conclusion|summary|therefore|thus|hence|ultimately|so,)\b",
    re.IGNORECASE,
)

Role = Literal["chunk", "label", "text"]
"""chunk: may be promised. label: stays on main and needs nothing that was promised before it, such
as a heading. text: stays on main and may need it all."""


@dataclass(frozen=True, slots=True)
class Part:
    """Units `first:last` of a response and what becomes of them."""

    first: int
    last: int
    role: Role


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring chunks that are promised as one: `response[start:end]`."""

    start: int
    end: int
    num_tokens: int
    topics: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """Promises sections, items or paragraphs, whichever is quickest, where at least two come to
    `min_tokens` each. `count` gives the tokens of a text in the model's own tokenizer."""

    count: Callable[[str], int]
    unit: int = UNIT
    min_tokens: int = MIN_TOKENS
    max_groups: int = MAX_GROUPS
    name: ClassVar[str] = "structure"

    def __post_init__(self) -> None:
        for name in ("unit", "min_tokens", "max_groups"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}")

    def annotate(self, prompt: str, response: str) -> Annotation | Refusal:
        """The annotated response; unchanged where nothing has two parts. `details`: how it was
        cut (`by`), and the `promises` made."""
        units = cut_units(response)
        try:
            whole = self.count(response)
            found = [
                (self._steps(pieces), by, pieces)
                for by, parts in candidates(response, units)
                if (pieces := self._grouped(response, units, parts))
            ]
            best = min(found, key=lambda entry: entry[0], default=None)
            if best is None or best[0] >= whole:
                return Annotation(response, {"by": "nothing", "promises": 0})
            _, by, pieces = best
            text = self._write(response, pieces)
        except InvalidInput as error:
            return Refusal([f"not-encodable: {error}"])
        num_promises = sum(isinstance(piece, Group) for piece in pieces)
        return Annotation(text, {"by": by, "promises": num_promises})

    # -- internals -----------------------------------------------------------------------------

    def _grouped(
        self, response: str, units: Sequence[Unit], parts: Sequence[Part]
    ) -> list[Group | tuple[str, Role]]:
        """Groups of chunks and texts of main, in order; empty if no run of siblings comes to two
        groups. A run that does not is main's. Chunks are larger where they are too many to fork."""
        least = self.min_tokens
        while True:
            pieces = self._pieces(response, units, parts, least)
            if sum(isinstance(piece, Group) for piece in pieces) <= MAX_PROMISES:
                return pieces
            least *= 2

    def _pieces(
        self, response: str, units: Sequence[Unit], parts: Sequence[Part], least: int
    ) -> list[Group | tuple[str, Role]]:
        pieces: list[Group | tuple[str, Role]] = []
        for is_chunk, run in groupby(parts, key=lambda part: part.role == "chunk"):
            members = list(run)
            groups = self._groups(response, units, members, least) if is_chunk else []
            if len(groups) > 1:
                pieces += groups
                continue
            for part in members:
                text = response[units[part.first].start : units[part.last - 1].end]
                pieces.append((text, "text" if is_chunk else part.role))
        return pieces if any(isinstance(piece, Group) for piece in pieces) else []

    def _groups(
        self, response: str, units: Sequence[Unit], members: Sequence[Part], least: int
    ) -> list[Group]:
        """Siblings in groups of at least `least` tokens, more where they are too many; what is
        left over joins the last one."""
        while len(groups := self._grouped_by(response, units, members, least)) > self.max_groups:
            least *= 2
        return groups

    def _grouped_by(
        self, response: str, units: Sequence[Unit], members: Sequence[Part], least: int
    ) -> list[Group]:
        groups: list[Group] = []
        for part in members:
            start, end = units[part.first].start, units[part.last - 1].end
            first = units[part.first]
            topic = numbered(topic_of(response, first).text, response, first)
            if groups and groups[-1].num_tokens < least:
                last = groups.pop()
                start, topics = last.start, (*last.topics, topic)
            else:
                topics = (topic,)
            groups.append(Group(start, end, self.count(response[start:end]), topics))
        if len(groups) > 1 and groups[-1].num_tokens < least:
            short, last = groups.pop(), groups.pop()
            text = response[last.start : short.end]
            topics = (*last.topics, *short.topics)
            groups.append(Group(last.start, short.end, self.count(text), topics))
        return groups

    def _steps(self, pieces: Sequence[Group | tuple[str, Role]]) -> int:
        """About how many steps the pieces take: main's own, and the waits at its syncs."""
        clock = ready = 0
        for piece in pieces:
            if isinstance(piece, Group):
                clock += PROMISE_STEPS
                ready = max(ready, clock + piece.num_tokens + 1)
                continue
            text, role = piece
            if role == "text":
                clock, ready = max(clock, ready) + 1, 0
            clock += self.count(text)
        return max(clock, ready)

    def _write(self, response: str, pieces: Sequence[Group | tuple[str, Role]]) -> str:
        written: list[str] = []
        is_open = False
        for number, piece in enumerate(pieces, start=1):
            if isinstance(piece, Group):
                topic = self.topic(piece.topics) or f"part {number}"
                content = response[piece.start : piece.end]
                written.append(write_chunk(topic, promised(piece.num_tokens, self.unit), content))
                is_open = True
                continue
            text, role = piece
            if is_open and role == "text" and text.strip():
                written.append("<sync/>")
                is_open = False
            written.append(text)
        return "".join(written)

    def topic(self, topics: Sequence[str]) -> str:
        """One topic of several, as many as fit the tokens that a topic may have."""
        named = list(dict.fromkeys(t for t in topics if t))
        for size in range(min(len(named), MAX_GROUP_TOPICS), 0, -1):
            if self.count(text := "; ".join(named[:size])) <= MAX_TOPIC_TOKENS:
                return text
        words = named[0].split() if named else []
        while words and self.count(" ".join(words)) > MAX_TOPIC_TOKENS:
            words.pop()
        return clean_topic(" ".join(words))


# -- ways to cut a response --------------------------------------------------------------------


def candidates(response: str, units: Sequence[Unit]) -> Iterator[tuple[str, list[Part]]]:
    """Ways to cut it, coarse to fine, each covering all units: its sections, its items, or where
    it has neither, its paragraphs."""
    pieces = _pieces(units, 0, len(units))
    inside = pieces
    while len([p for p in inside if p[1] - p[0] > 1]) == 1 and _is_title(units, inside):
        title = next(p for p in inside if p[1] - p[0] > 1)
        inside = [(title[0], title[0] + 1), *_pieces(units, title[0] + 1, title[1])]
        pieces = [p for p in pieces if p[1] <= title[0]] + inside
    sections = [p for p in pieces if p[1] - p[0] > 1]
    num_items = sum(unit.kind == "item" for unit in units)
    if len(sections) > 1:
        yield "sections", _by_section(response, units, pieces)
    if num_items > 1:
        yield "items", _by_item(units)
    elif len(sections) < 2:
        yield "paragraphs", _by_paragraph(response, units)


def _pieces(units: Sequence[Unit], first: int, last: int) -> list[tuple[int, int]]:
    """The outermost pieces of units `first:last`; a lead or heading is one with what it leads."""
    pieces = []
    at = first
    while at < last:
        end = min(max(units[at].scope_end, at + 1), last)
        pieces.append((at, end))
        at = end
    return pieces


def _is_title(units: Sequence[Unit], pieces: Sequence[tuple[int, int]]) -> bool:
    """Whether the only piece of several units is a heading over all that follows."""
    first, last = next(p for p in pieces if p[1] - p[0] > 1)
    return units[first].kind == "heading" and last == pieces[-1][1]


def _is_conclusion(response: str, unit: Unit) -> bool:
    return CONCLUSION.match(response, unit.body, unit.end) is not None


def _by_section(
    response: str, units: Sequence[Unit], pieces: Sequence[tuple[int, int]]
) -> list[Part]:
    parts = []
    for index, (first, last) in enumerate(pieces):
        role: Role = "label" if units[first].is_lead else "text"
        if index == len(pieces) - 1 and _is_conclusion(response, units[first]):
            role = "text"
        elif last - first > 1:
            role = "chunk"
        parts.append(Part(first, last, role))
    return parts


def _by_item(units: Sequence[Unit]) -> list[Part]:
    roles: dict[str, Role] = {"item": "chunk", "heading": "label", "lead": "label"}
    return [Part(i, i + 1, roles.get(unit.kind, "text")) for i, unit in enumerate(units)]


def _by_paragraph(response: str, units: Sequence[Unit]) -> list[Part]:
    """Paragraphs whole, code and tables with the paragraph before them, leads with what they lead
    to. A conclusion at the end is main's."""
    parts: list[Part] = []
    for index, unit in enumerate(units):
        joins = parts and (
            unit.kind in ("fence", "table")
            or units[index - 1].is_lead
            or (unit.kind == "sentences" and not _has_blank_line(response, unit))
        )
        if joins:
            parts[-1] = replace(parts[-1], last=index + 1)
        else:
            parts.append(Part(index, index + 1, "chunk"))
    if len(parts) > 1 and _is_conclusion(response, units[parts[-1].first]):
        parts[-1] = replace(parts[-1], role="text")
    return parts


def _has_blank_line(response: str, unit: Unit) -> bool:
    separator = response[unit.start : unit.body]
    return separator.count("\n") > 1
