"""Cuts a response into units: the smallest parts that could be decoded in a thread of their own.

A unit is a list item (nested lines kept inside), a heading, a line that leads into what follows,
a paragraph, a run of sentences of a long paragraph, a code fence or a table. Units partition the
response: each begins with the separator before it, so that no thread needs to know whether
anything comes after what it writes. Knows Markdown's shapes, no model and no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

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


# -- lines -----------------------------------------------------------------------------------------

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+\S")
_BOLD_LINE = re.compile(r"[ \t]*(\*\*|__)(?=\S)[^\n]*?(?<=\S)\1:?[ \t]*:?\r?\n?")
_ITEM = re.compile(
    r"([ \t]*)(?:[-*+•◦–][ \t]+|\(?(?:\d{1,3}|[A-Za-z])[.)][ \t]+|(?:[Ss]tep|STEP) \d+[:.)][ \t]*)"
    r"(?=\S)"
)
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*\r?\n?")
_MARKER = re.compile(
    r"\s*(?:>[ \t]*)?(?:#{1,6}[ \t]+)?"
    r"(?:(?:[-*+•◦–]|\(?(?:\d{1,3}|[A-Za-z])[.)]|(?:[Ss]tep|STEP) \d+[:.)])[ \t]+)?"
    r"(?:\[[ xX]\][ \t]+)?(?:\*\*|__)?"
)


@dataclass(frozen=True, slots=True)
class _Block:
    """Whole lines `start:end`; blank lines stand between blocks. `indent` is an item's."""

    start: int
    end: int
    kind: UnitKind
    indent: int = 0


def _lines(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in _LINE.finditer(text)]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


class _Reader:
    """Reads blocks line by line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = _lines(text)
        self.at = 0

    def line(self, ahead: int = 0) -> str | None:
        if self.at + ahead >= len(self.lines):
            return None
        start, end = self.lines[self.at + ahead]
        return self.text[start:end]

    def blocks(self) -> Iterator[_Block]:
        while (line := self.line()) is not None:
            if not line.strip():
                self.at += 1
                continue
            first = self.at
            kind, indent = self._take(line)
            yield _Block(self.lines[first][0], self.lines[self.at - 1][1], kind, indent)

    def _take(self, line: str) -> tuple[UnitKind, int]:
        """Takes the lines of one block; the reader is then at the line after it."""
        if fence := _FENCE.match(line):
            self._take_fence(fence[1])
            return "fence", 0
        if line.lstrip().startswith("|"):
            self._take_while(lambda following: following.lstrip().startswith("|"))
            return "table", 0
        if _HEADING.match(line) or _BOLD_LINE.fullmatch(line):
            self.at += 1
            return "heading", 0
        if (item := _ITEM.match(line)) and not _RULE.fullmatch(line):
            self._take_item(len(item[1]))
            return "item", len(item[1])
        self._take_while(lambda following: not _starts_block(following))
        return "paragraph", 0

    def _take_while(self, goes_on: object) -> None:
        assert callable(goes_on)
        self.at += 1
        while (line := self.line()) is not None and line.strip() and goes_on(line):
            self.at += 1

    def _take_fence(self, mark: str) -> None:
        self.at += 1
        close = re.compile(rf"[ \t]*{re.escape(mark[0])}{{{len(mark)},}}[ \t]*\r?\n?")
        while (line := self.line()) is not None:
            self.at += 1
            if close.fullmatch(line):
                return

    def _take_item(self, indent: int) -> None:
        """An item goes on with deeper lines, also after blank ones, and with lazy text lines."""
        self.at += 1
        while (line := self.line()) is not None:
            if not line.strip():
                ahead = 1
                while (after := self.line(ahead)) is not None and not after.strip():
                    ahead += 1
                if after is None or _indent(after) <= indent:
                    return
                self.at += ahead
            elif fence := re.match(r"[ \t]*(`{3,}|~{3,})", line):
                self._take_fence(fence[1])
            elif _indent(line) > indent:
                self.at += 1
            elif _starts_block(line):
                return
            else:
                self.at += 1


def _starts_block(line: str) -> bool:
    return bool(
        _FENCE.match(line)
        or _HEADING.match(line)
        or _BOLD_LINE.fullmatch(line)
        or line.lstrip().startswith("|")
        or (_ITEM.match(line) and not _RULE.fullmatch(line))
    )


# -- units -----------------------------------------------------------------------------------------

_SENTENCE_END = re.compile(r"""[.!?]["')\]*_]*\s+(?=["'(\[*_]*[A-Z0-9])""")
_COLONS = (":", ":**", ":__")
_ABBREVIATION = re.compile(r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|vs|etc|e\.g|i\.e|No|Fig)|^\s*\d+)$")


def cut_units(response: str) -> list[Unit]:
    """The units of a response, in order: `"".join(response[u.start:u.end])` gives it back.

    Empty for a response without any character that is not whitespace. Whitespace at the end
    belongs to the last unit. Linear in the response's length but for pathological nesting.
    """
    spans: list[tuple[int, UnitKind]] = []
    for block in _Reader(response).blocks():
        text = response[block.start : block.end]
        if block.kind == "paragraph":
            if text.rstrip().endswith(_COLONS) and len(text.split()) <= LEAD_WORDS:
                spans.append((block.end, "lead"))
            else:
                spans += [(block.start + end, kind) for end, kind in _sentence_runs(text)]
        elif spans and block.kind in ("fence", "table") and _asks(response, spans[-1]):
            spans[-1] = (block.end, "item")
        else:
            spans.append((block.end, block.kind))
    return _with_scopes(response, _placed(response, spans))


def _asks(response: str, span: tuple[int, UnitKind]) -> bool:
    """Whether it is an item that ends with a colon: a block right after it is its own."""
    end, kind = span
    return kind == "item" and response[:end].rstrip()[-3:].endswith(_COLONS)


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


# -- topics ----------------------------------------------------------------------------------------

TOPIC_WORDS = 6
NAME_WORDS = 8
LONGEST_TOPIC = 60
LONGEST_WORD = 24
"""Of a topic and of a word of it, in characters."""
_LEAD_IN = re.compile(
    r"""([^\n:]{1,80}?)(\*\*|__)?(:|\s[-–—]\s|(?<!vs)(?<!Dr)(?<!Mr)(?<!St)\.(?=\s)|\*\*|__)(\*\*|__)?"""
)
_WORD = re.compile(r"\S+")
_WEAK_WORDS = (
    "a an and are as at be been but by can could for from has have he her his i if in into is it "
    "its may me my of on or our she should so such than that the their them then there these they "
    "this to was we were when where which while who will with would you your also because"
)
_WEAK = frozenset(_WEAK_WORDS.split())
_EDGE = " \t*_`#\"'“”‘’:;,.!?-–—"


@dataclass(frozen=True, slots=True)
class Topic:
    """A unit's own first words. `text`: as an attribute, no quotes, no line break, maybe empty.
    `end`: where they end in the response, their markup included. `is_name`: the text sets them
    off itself (bold, a colon, a heading, a short first sentence)."""

    text: str
    end: int
    is_name: bool


def topic_of(response: str, unit: Unit) -> Topic:
    """What main may say of a unit before it is written: its name, else its first words.

    At most `NAME_WORDS` words of a name, else `TOPIC_WORDS`, the last of them not weak.
    """
    line_end = response.find("\n", unit.body, unit.end)
    stop = unit.end if line_end < 0 else line_end
    if unit.kind == "fence":
        language = clean_topic(response[unit.body : stop].strip("`~ \t"))
        return Topic(f"{language} code".strip(), stop, True)
    found = _LEAD_IN.match(response, unit.body, stop)
    if unit.kind == "heading":
        name, end = response[unit.body : stop], stop
    elif found is not None:
        name, end = found[1], found.end()
    else:
        name, end = response[unit.body : stop], stop
    words = name.split()
    is_set_off = unit.kind == "heading" or found is not None
    is_name = is_set_off and len(words) <= NAME_WORDS
    is_name = is_name and len(name) <= LONGEST_TOPIC
    if is_name and (text := clean_topic(" ".join(words))):
        return Topic(text, end, True)
    return _first_words(response, unit.body, stop)


def _first_words(response: str, start: int, stop: int) -> Topic:
    """The first words up to `TOPIC_WORDS`, weak ones at the end left out."""
    spans = [found.span() for found in _WORD.finditer(response, start, stop)][:TOPIC_WORDS]
    if spans and spans[0][1] - spans[0][0] > LONGEST_WORD:  # a script without spaces
        end = spans[0][0] + LONGEST_WORD // 2
        return Topic(clean_topic(response[start:end]), end, False)
    while len(spans) > 1 and spans[-1][1] - spans[0][0] > LONGEST_TOPIC:
        spans.pop()
    while len(spans) > 1 and is_weak_word(response[slice(*spans[-1])]):
        spans.pop()
    end = spans[-1][1] if spans else start
    return Topic(clean_topic(response[start:end]), end, False)


def is_weak_word(word: str) -> bool:
    """Whether a word says nothing by itself, so that no topic should begin or end with it."""
    bare = word.strip(_EDGE + "()[]{}").lower()
    return not bare or bare in _WEAK


def clean_topic(text: str) -> str:
    """Text as an attribute: markup, quotes and line breaks out, no mark at either end, brackets
    closed or left out."""
    text = re.sub(r"[\"`\r\n\v\f\x1c-\x1e\x85\u2028\u2029]|\*\*|__", " ", text)
    text = " ".join(text.split()).strip(_EDGE + " ")
    for opening, closing in ("()", "[]", "{}"):
        if text.count(opening) != text.count(closing):
            text = " ".join(text.replace(opening, " ").replace(closing, " ").split())
        elif text.startswith(opening) and text.endswith(closing):
            text = text[1:-1]
    return text.strip(_EDGE + " ")
