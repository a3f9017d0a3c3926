"""Blocks of Markdown, as far as they matter to what could be written apart: lines of one kind.

Total: any text is read, and one that is no Markdown is paragraphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

BlockKind = Literal["item", "heading", "paragraph", "fence", "table"]

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+\S")
_BOLD_LINE = re.compile(r"[ \t]*(\*\*|__)(?=\S)[^\n]*?(?<=\S)\1:?[ \t]*:?\r?\n?")
_ITEM = re.compile(
    r"([ \t]*)(?:[-*+•◦–][ \t]+|\(?(?:\d{1,3}|[A-Za-z])[.)][ \t]+|(?:[Ss]tep|STEP) \d+[:.)][ \t]*)"
    r"(?=\S)"
)
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*\r?\n?")


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines `start:end`; blank lines stand between blocks. `indent` is an item's."""

    start: int
    end: int
    kind: BlockKind
    indent: int = 0


def _lines(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in _LINE.finditer(text)]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


class Reader:
    """Reads a text's blocks line by line, in time linear in its length."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = _lines(text)
        self.at = 0

    def line(self, ahead: int = 0) -> str | None:
        if self.at + ahead >= len(self.lines):
            return None
        start, end = self.lines[self.at + ahead]
        return self.text[start:end]

    def blocks(self) -> Iterator[Block]:
        while (line := self.line()) is not None:
            if not line.strip():
                self.at += 1
                continue
            first = self.at
            kind, indent = self._take(line)
            yield Block(self.lines[first][0], self.lines[self.at - 1][1], kind, indent)

    def _take(self, line: str) -> tuple[BlockKind, int]:
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

    def _take_while(self, goes_on: Callable[[str], bool]) -> None:
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
