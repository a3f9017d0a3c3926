"""Views: one response laid out several times, so that one pass shows what each part rests on.

All of these layouts are traces, and who sees what is `trace.visible` of them. With units u1 … un:

- *full*: prompt, u1, …, un in plain order. Each token sees all before it.
- *outline*: prompt, o1, …, on, where oi is what main would have: a unit that stays on main whole,
  any other cut off after its topic. Branches off it: uj whole, after o1 … o(j-1). There uj sees the
  topics of its elder siblings and none of their text.
- *pairs*: as the branches, but u(j-1) stands whole before uj: all is hidden but the neighbour.
- *plan*: exactly what a plan hides. A chunk's outline stands in its place until a `<sync/>`; what
  follows that sees the full text before it.

The same tokens of uj are read in each place, so a difference of their log-probs is what visibility
alone does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stretto.data.topics import Topic, topic_of
from stretto.data.units import Unit, cut_units
from stretto.dialects.base import Vocabulary
from stretto.idset import IdSet
from stretto.trace import Origin, Segment, Thread, Trace

_WORDING = re.compile(r"\s*(?:[^\W\d_]{2}[^\W\d_'’-]*|[.,;:'’!?-])[.,;:!?]?\Z")
ELLIPSIS = " ..."
"""Stands for hidden text in the outline, so that the model reads an outline and not an end."""


@dataclass(frozen=True)
class Part:
    """A unit as tokens. `ids`: of its text on its own, as a thread writes it. `num_marker`: those
    before its content, `num_named`: those up to the end of its topic, markup included. `outline`:
    its ids in the outline; equal to `ids` where it is not cut off. `is_main`: never promised."""

    unit: Unit
    topic: Topic
    ids: list[int]
    num_marker: int
    num_named: int
    wording: tuple[bool, ...]
    outline: list[int]
    is_main: bool

    @property
    def is_hidden(self) -> bool:
        """Whether its outline leaves something out."""
        return self.outline != self.ids


@dataclass(frozen=True)
class Prepared:
    """A prompt's ids and a response's parts."""

    prompt_ids: list[int]
    parts: list[Part]

    @property
    def num_tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)


def prepare(
    prompt_ids: Sequence[int], response: str, vocabulary: Vocabulary, *, min_hidden: int = 4
) -> Prepared:
    """Cuts and encodes. Raises `InvalidInput` for text that the vocabulary cannot encode.

    A unit of which the outline would leave out fewer than `min_hidden` tokens is in it whole. The
    first unit stays on main unless a list or section begins with it: what follows rests on it.
    """
    parts = []
    for index, unit in enumerate(cut_units(response)):
        topic = topic_of(response, unit)
        ids = vocabulary.encode(response[unit.start : unit.end])
        marker = len(vocabulary.encode(response[unit.start : unit.body]))
        named = len(vocabulary.encode(response[unit.start : topic.end]))
        is_main = unit.is_lead or (index == 0 and unit.kind in ("paragraph", "sentences"))
        wording = tuple(bool(_WORDING.match(vocabulary.decode([token]))) for token in ids)
        outline = ids
        if not is_main and topic.text and len(ids) - named >= min_hidden:
            outline = vocabulary.encode(response[unit.start : topic.end] + ELLIPSIS)
        parts.append(
            Part(unit, topic, ids, marker, named, wording, outline, is_main or not topic.text)
        )
    return Prepared(list(prompt_ids), parts)


@dataclass(frozen=True)
class Reading:
    """A segment to be read: the log-probs of its tokens, the first as predicted by the last token
    of segment `after`."""

    segment: int
    after: int


@dataclass
class Sheet:
    """A trace under construction, and what is to be read of it."""

    readings: list[Reading] = field(default_factory=list)
    _segments: list[Segment] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], sees: IdSet, after: int | None, role: str) -> int:
        """A causal segment that sees `sees` and goes on from the end of segment `after`."""
        start = 0 if after is None else self._ends[after]
        number, size = len(self._segments), len(tokens)
        given: Origin = "prompt"
        self._segments.append(
            Segment(
                id=number,
                thread="main",
                kind="causal",
                role=role,
                sees=sees,
                tokens=tuple(tokens),
                positions=tuple(range(start, start + size)),
                origins=(given,) * size,
                markup=(False,) * size,
                steps=(None,) * size,
            )
        )
        self._ends.append(start + size)
        return number

    def read(self, segment: int, after: int) -> int:
        """Asks for a segment's log-probs; the number of the answer."""
        self.readings.append(Reading(segment, after))
        return len(self.readings) - 1

    @property
    def trace(self) -> Trace:
        return Trace(tuple(self._segments), (Thread("main", None, None, None),))

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self._segments)


@dataclass(frozen=True)
class Views:
    """A sheet, and for each unit the numbers of its readings; None where it has none, since
    nothing is before it (`full`) or nothing would be hidden from it (`blind`)."""

    sheet: Sheet
    full: list[int | None]
    blind: list[int | None]


def first_views(prepared: Prepared) -> Views:
    """Full and outline."""
    sheet = Sheet()
    root = sheet.add(prepared.prompt_ids, IdSet(), None, "prompt")
    full: list[int | None] = []
    after, sees = root, IdSet([root])
    is_needed = [any(p.is_hidden for p in prepared.parts[:i]) for i in range(len(prepared.parts))]
    for part in prepared.parts:
        segment = sheet.add(part.ids, sees, after, "full")
        full.append(sheet.read(segment, after) if after != root else None)
        after, sees = segment, IdSet([*sees, segment])
    blind: list[int | None] = []
    after, sees = root, IdSet([root])
    for part, needed in zip(prepared.parts, is_needed, strict=True):
        outline = sheet.add(part.outline, sees, after, "outline")
        branch = (
            sheet.add(part.ids, sees, after, "branch") if part.is_hidden and needed else outline
        )
        blind.append(sheet.read(branch, after) if needed else None)
        after, sees = outline, IdSet([*sees, outline])
    return Views(sheet, full, blind)


def pair_views(prepared: Prepared, wanted: Sequence[int]) -> tuple[Sheet, dict[int, int]]:
    """For each wanted unit a branch in which the unit before it stands whole; the numbers of the
    readings by unit. Where that hides as much as before, or nothing at all, there is none."""
    sheet = Sheet()
    root = sheet.add(prepared.prompt_ids, IdSet(), None, "prompt")
    after, sees = root, IdSet([root])
    readings: dict[int, int] = {}
    asked = set(wanted)
    for index, part in enumerate(prepared.parts):
        is_hidden_before = any(p.is_hidden for p in prepared.parts[:index])
        if index + 1 in asked and part.is_hidden and is_hidden_before:
            whole = sheet.add(part.ids, sees, after, "branch")
            pair = sheet.add(prepared.parts[index + 1].ids, IdSet([*sees, whole]), whole, "branch")
            readings[index + 1] = sheet.read(pair, whole)
        outline = sheet.add(part.outline, sees, after, "outline")
        after, sees = outline, IdSet([*sees, outline])
    return sheet, readings


class Written(Protocol):
    """What a plan does with a unit; see `likelihood_plan.Move`."""

    @property
    def place(self) -> str: ...
    @property
    def sync(self) -> bool: ...


def plan_views(
    prepared: Prepared, moves: Sequence[Written], heads: Sequence[Sequence[int]]
) -> tuple[Sheet, dict[int, int]]:
    """What each unit sees under a plan; the numbers of the readings by unit, for those that are
    blind to anything. `heads[i]`: the outline of a chunk that begins with unit `i`."""
    sheet = Sheet()
    root = sheet.add(prepared.prompt_ids, IdSet(), None, "prompt")
    full = [root]
    after, sees = root, IdSet([root])
    inner, inner_sees = root, sees
    readings: dict[int, int] = {}
    is_blind = blind_in_chunk = False
    for index, (part, move) in enumerate(zip(prepared.parts, moves, strict=True)):
        if move.sync:
            for known in prepared.parts[len(full) - 1 : index]:
                full.append(sheet.add(known.ids, IdSet(full), full[-1], "full"))
            after, sees, is_blind = full[-1], IdSet(full), False
        if move.place == "start":
            inner, inner_sees, blind_in_chunk = after, sees, is_blind
        goes_on, seen = (after, sees) if move.place == "main" else (inner, inner_sees)
        segment = sheet.add(part.ids, seen, goes_on, "branch")
        if is_blind if move.place == "main" else blind_in_chunk:
            readings[index] = sheet.read(segment, goes_on)
        if move.place == "main":
            after, sees = segment, IdSet([*sees, segment])
            continue
        inner, inner_sees = segment, IdSet([*inner_sees, segment])
        if move.place == "start":
            outline = sheet.add(heads[index], sees, after, "outline")
            after, sees, is_blind = outline, IdSet([*sees, outline]), True
    return sheet, readings
