"""What an annotated source says: which tags are legal where they stand, and whose text is whose.

The same for text and for ids, and for every dialect with the tags of `stretto.dialects.tags`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stretto.dialects.base import Issue
from stretto.dialects.tags import Tag, TagKind

# -- which tags are legal --------------------------------------------------------------------------

Where = TypeVar("Where")


class Rules(Generic[Where]):
    """The one automaton that decides which tags are legal; what is not is text, and named.

    `Where` is how the caller denotes a place; `issues` holds a code and the place of the tag that
    it is about, in the order of discovery. The caller says whether a tag stands in a child.
    """

    def __init__(self) -> None:
        self.issues: list[tuple[str, Where]] = []
        self.pending: deque[Where] = deque()
        self._literal_async = False

    def admits(self, kind: TagKind, where: Where, *, in_child: bool) -> bool:
        """Whether a tag is legal here; takes note of it either way."""
        if in_child:
            return self._admits_in_child(kind, where)
        if kind == "promise":
            self.pending.append(where)
        elif kind == "sync":
            self.give_up_pending()
        elif kind == "async" and self.pending:
            self.pending.popleft()
        elif kind == "async":
            self.issues.append(("async-without-promise", where))
            self._literal_async = True
            return False
        else:
            if not self._literal_async:
                self.issues.append(("async-without-promise", where))
            self._literal_async = False
            return False
        return True

    def give_up_pending(self) -> None:
        """At a sync and at the end: promises without a block take none any more."""
        self.issues.extend(("promise-without-async", where) for where in self.pending)
        self.pending.clear()

    def _admits_in_child(self, kind: TagKind, where: Where) -> bool:
        if kind == "async_end":
            return True
        self.issues.append(("nested-promise", where))
        if kind == "async":
            self._literal_async = True
        return False


# -- what an annotated source says, by threads -----------------------------------------------------


@dataclass(slots=True)
class Block:
    """A promise's block: the content is `source[start:end]`."""

    start: int
    end: int
    closed: bool


@dataclass(slots=True)
class Promised:
    """A promise on main and its block, None for a promise that never got one."""

    tag: Tag
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run of main's text between two legal tags: `source[start:end]`, never empty."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sync:
    """A legal `<sync/>`."""

    tag: Tag


Part = Run | Promised | Sync


def outline(tags: Iterable[Tag], end: int) -> tuple[list[Part], list[Issue]]:
    """Main's parts in order, blocks hung on their promises, of a source of length `end`.

    Where a block stands in the source leaves no trace. Issues come in the order of discovery.
    """
    rules: Rules[int] = Rules()
    parts: list[Part] = []
    pending: deque[Promised] = deque()
    block: Block | None = None
    opened, at = 0, 0
    for tag in tags:
        if not rules.admits(tag.kind, tag.start, in_child=block is not None):
            continue
        run = Run(at, tag.start)
        at = tag.end
        if block is not None:
            block.end, block.closed = tag.start, True
            block = None
            continue
        if run.start < run.end:
            parts.append(run)
        if tag.kind == "promise":
            rules.issues.extend((code, tag.start) for code in tag.issues)
            pending.append(Promised(tag))
            parts.append(pending[-1])
        elif tag.kind == "sync":
            parts.append(Sync(tag))
            pending.clear()
        else:
            opened = tag.start
            block = pending.popleft().block = Block(tag.end, end, closed=False)
    if block is not None:
        rules.issues.append(("unclosed-async", opened))
    elif at < end:
        parts.append(Run(at, end))
    rules.give_up_pending()
    return parts, [Issue(code, place) for code, place in rules.issues]
