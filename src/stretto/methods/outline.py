"""Reading an outline as it is written: its points, and whether it is plainly over.

A list item begins with `1.`, `1)`, `-`, `*`, `+` or `•`; a number may stand in bold or a heading.
Items that count up on one line (`1. a 2. b`) are items of their own. Sub-items (`1.1 x`, or a line
indented deeper than the first item) and items without a title are left out. A title is a heading:
it ends at a colon after a word, and has `MAX_TITLE_WORDS` words at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ITEM = re.compile(
    r"(?:(?P<lead>[#*_ \t]*)(?P<number>\d{1,3})[.)](?!\d)|[ \t]*(?:[-*+](?=\s|$)|•))(?P<rest>.*)",
    re.DOTALL,
)
_MAYBE_ITEM = re.compile(r"[#*_ \t]*(?:\d{1,3}[.)]?)?|[ \t]*[-+]?")
_SUB_ITEM = re.compile(r"[#*_ \t]*\d{1,3}(?:\.\d{1,3})+(?!\d).*", re.DOTALL)
_INLINE_MARK = re.compile(r"\s(\d{1,3})[.)](?=\s)")
_BOLD = re.compile(r"(\*\*|__)(.+?)\1")
_COLON = re.compile(r"(?<=[^\W\d_])[*_]*[:：](?=[\s*_]|$)")
MAX_TITLE_WORDS = 8
MAX_INTRODUCTION = 80
"""Characters that a first line ending in a colon may have to pass for an introduction."""


def outline_points(outline: str) -> list[str]:
    """The points of an outline, without their marks, up to where it is plainly over.

    Any text gives a list, empty if the text begins with no list.
    """
    reader = OutlineReader()
    reader.push(outline)
    return reader.finish()


class OutlineReader:
    """Takes an outline piece by piece; `points` are the titles of its complete items so far.

    `is_over` turns true where the outline plainly ends: at `max_points` points, a point said
    before, a second blank line, a list that starts again after a blank line, or as soon as a line
    can be no list item (before the first item: once it can be no introduction either). A first
    item with more than `MAX_TITLE_WORDS` words is prose, and no outline at all.
    """

    def __init__(self, max_points: int | None = None) -> None:
        self.max_points = max_points
        self.points: list[str] = []
        self.is_over = False
        self._line = ""
        self._is_decided = False
        self._indent: int | None = None
        self._number = 0
        self._num_blank = 0
        self._is_first = True
        self._known: set[str] = set()

    def push(self, text: str) -> None:
        """Reads on. Looks at a line under way only until it is known for an item or not."""
        for i, piece in enumerate(text.split("\n")):
            if i:
                self._end_line()
            if self.is_over:
                return
            self._line += piece
        if self._line and not self._is_decided:
            self._decide()

    @property
    def has_title(self) -> bool:
        """Whether the line under way holds a whole title, so that its item can end here."""
        if self.is_over or not self._is_decided or self._is_detail(self._line):
            return False
        item = _ITEM.match(self._line)
        text = item["rest"] if item else ""
        return len(text.split()) > MAX_TITLE_WORDS or _COLON.search(text) is not None

    def finish(self, is_complete: bool = True) -> list[str]:
        """The points. An incomplete outline's last line counts only if there is no other point."""
        if self._line and not self.is_over and (is_complete or not self.points):
            self._end_line()
        self.is_over = True
        return self.points

    def _decide(self) -> None:
        line = self._line
        if _ITEM.match(line) or self._is_detail(line):
            self._is_decided = True
        elif self._is_first:
            self.is_over = len(line) > MAX_INTRODUCTION
        else:
            self.is_over = not _MAYBE_ITEM.fullmatch(line)

    def _end_line(self) -> None:
        line, self._line, self._is_decided = self._line.rstrip(), "", False
        if not line:
            self._num_blank += self._indent is not None
            self.is_over = self._num_blank > 1
            return
        is_first, self._is_first = self._is_first, False
        if self._is_detail(line):
            return
        item = _ITEM.fullmatch(line)
        if item is not None:
            self._take(item, line)
        else:
            self.is_over = not (is_first and line.endswith(":") and len(line) <= MAX_INTRODUCTION)

    def _is_detail(self, line: str) -> bool:
        is_deeper = self._indent is not None and _indent(line) > self._indent and bool(line.strip())
        return is_deeper or _SUB_ITEM.fullmatch(line) is not None

    def _take(self, item: re.Match[str], line: str) -> None:
        number = int(item["number"] or 0)
        is_again = self._num_blank and number and number <= self._number
        if is_again or (not self.points and _is_prose(number, item["rest"])):
            self.is_over = True
            return
        self._num_blank = 0
        self._indent = _indent(line) if self._indent is None else self._indent
        for self._number, text in _split(number, item["rest"]):
            title = _title(text.partition("**")[0] if "**" in (item["lead"] or "") else text)
            if not title:
                continue
            if title.casefold() in self._known:
                self.is_over = True
                return
            self._known.add(title.casefold())
            self.points.append(title)
            if len(self.points) == self.max_points:
                self.is_over = True
                return


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _split(number: int, text: str) -> Iterator[tuple[int, str]]:
    """The items on a line whose first item has this number (0: a bullet), as far as they count
    up."""
    start = 0
    for mark in _INLINE_MARK.finditer(text) if number else ():
        if int(mark[1]) == number + 1:
            yield number, text[start : mark.start()]
            number, start = number + 1, mark.end()
    yield number, text[start:]


def _is_prose(number: int, text: str) -> bool:
    _, first = next(_split(number, text))
    heading = _COLON.split(first, maxsplit=1)[0]
    return len(heading.split()) > MAX_TITLE_WORDS and _BOLD.match(first.strip()) is None


def _title(text: str) -> str:
    """An item's title: of a bold beginning that alone, without emphasis and closing marks."""
    text = " ".join(text.split())
    bold = _BOLD.match(text)
    text = bold[2] if bold else text
    text = " ".join(_COLON.split(text, maxsplit=1)[0].split()[:MAX_TITLE_WORDS])
    text = text.strip("*_` ").rstrip(" :;,.-–—").strip("*_` ")
    return text if any(c.isalnum() for c in text) else ""
