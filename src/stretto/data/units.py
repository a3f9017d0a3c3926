"""Cuts a response into units: the smallest parts that could be decoded in a thread of their own.

A unit is a list item (nested lines kept inside), a heading, a line that leads into what follows,
a paragraph, a run of sentences of a long paragraph, a code fence or a table. Units partition the
response: each begins with the separator before it, so that no thread needs to know whether
anything comes after what it writes. Knows Markdown's shapes, no model and no tokenizer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from stretto.data.blocks import Block, Reader

UnitKind = Literal["item", "heading", "lead", "paragraph", "sentences", "fence", "table"]

LONG_PARAGRAPH_WORDS = 70
"""A paragraph of more words is cut into runs of sentences."""
SENTENCE_RUN_WORDS = 25
"""A run of sentences has at least so many words."""
LEAD_WORDS = 40
"""A paragraph that ends with a colon leads into what follows if it has at most so many words."""


@dataclass(frozen=True, slots=True)
class Unit:
    """`response[start:end]`; offsets are code points of the response.

    `body`: where content begins, after separator and marker (bullet, number, `#`, `**`).
    `scope_end`: for a heading or a lead, the index of the first unit that it does not introduce;
    for others their own index + 1. `scope_end > index + 1` means that other units rest on it.
    """

    start: int
    end: int
    body: int
    kind: UnitKind
    scope_end: int = 0

    @property
    def is_lead(self) -> bool:
        return self.kind in ("heading", "lead")


_MARKER = re.compile(
    r"\s*(?:>[ \t]*)?(?:#{1,6}[ \t]+)?"
    r"(?:(?:[-*+•◦–]|\(?(?:\d{1,3}|[A-Za-z])[.)]|(?:[Ss]tep|STEP) \d+[:.)])[ \t]+)?"
    r"(?:\[[ xX]\][ \t]+)?(?:\*\*|__)?"
)
_SENTENCE_END = re.compile(r"""[.!?]["')\]*_]*\s+(?=["'(\[*_]*[A-Z0-9])""")
_COLONS = (":", ":**", ":__")
_ABBREVIATION = re.compile(r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|vs|etc|e\.g|i\.e|No|Fig)|^\s*\d+)$")


def cut_units(response: str) -> list[Unit]:
    """The units of a response, in order: `"".join(response[u.start:u.end])` gives it back.

    Empty for a response without any character that is not whitespace. Whitespace at the end
    belongs to the last unit. Linear in the response's length but for pathological nesting.
    """
    spans: list[tuple[int, UnitKind]] = []
    last: Block | None = None
    for block in Reader(response).blocks():
        text = response[block.start : block.end]
        if block.kind == "paragraph":
            if text.rstrip().endswith(_COLONS) and len(text.split()) <= LEAD_WORDS:
                spans.append((block.end, "lead"))
            else:
                spans += [(block.start + end, kind) for end, kind in _sentence_runs(text)]
        elif block.kind in ("fence", "table") and last is not None and _asks(response, last):
            spans[-1] = (block.end, "item")
        else:
            spans.append((block.end, block.kind))
        last = block
    return _with_scopes(response, _placed(response, spans))


def _asks(response: str, block: Block) -> bool:
    """Whether it is an item that ends with a colon: a block right after it is its own."""
    return block.kind == "item" and response[block.start : block.end].rstrip().endswith(_COLONS)


def _placed(response: str, spans: list[tuple[int, UnitKind]]) -> list[Unit]:
    """Units from the ends of their contents: whitespace after one goes to the next."""
    units: list[Unit] = []
    start = 0
    for index, (stop, kind) in enumerate(spans):
        end = start + len(response[start:stop].rstrip())
        if index == len(spans) - 1:
            end = len(response)
        marker = _MARKER.match(response, start, end)
        body = marker.end() if marker is not None else start
        if body >= end:
            body = start
        units.append(Unit(start, end, body, kind))
        start = end
    return units


def _sentence_runs(text: str) -> list[tuple[int, UnitKind]]:
    """Ends of the runs of sentences of a paragraph, offsets into it; one run if it is short."""
    if len(text.split()) <= LONG_PARAGRAPH_WORDS:
        return [(len(text), "paragraph")]
    ends: list[int] = []
    start = 0
    for found in _SENTENCE_END.finditer(text):
        if _ABBREVIATION.search(text[start : found.start()]) and text[found.start()] == ".":
            continue
        if len(text[start : found.end()].split()) >= SENTENCE_RUN_WORDS:
            ends.append(found.end())
            start = found.end()
    if ends and len(text[start:].split()) < SENTENCE_RUN_WORDS:
        ends.pop()
    return [(end, "sentences") for end in [*ends, len(text)]]


def _with_scopes(response: str, units: list[Unit]) -> list[Unit]:
    """Each heading and lead learns how far it reaches. A lead without anything after it is a
    paragraph."""
    scoped = []
    for index, unit in enumerate(units):
        end = index + 1
        if unit.kind == "heading":
            level = _level(response, unit)
            while end < len(units) and not (
                units[end].kind == "heading" and _level(response, units[end]) <= level
            ):
                end += 1
        elif unit.kind == "lead" and end < len(units) and units[end].kind != "heading":
            is_list = units[end].kind == "item"
            end += 1
            while is_list and end < len(units) and units[end].kind == "item":
                end += 1
        kind = "paragraph" if unit.is_lead and end == index + 1 else unit.kind
        scoped.append(replace(unit, kind=kind, scope_end=end))
    return scoped


def _level(response: str, unit: Unit) -> int:
    """A heading's level: of `#` their number, a line in bold is below them all."""
    text = response[unit.start : unit.end].lstrip()
    return len(text) - len(text.lstrip("#")) or 7
