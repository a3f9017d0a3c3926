"""Document order from events: the drawn text tokens of an answer, as early as it is settled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stretto.recorder import MAIN
from stretto.runtime.events import Event, ThreadEnd, ThreadStart, Token
from stretto.trace import is_drawn


class Drawn(NamedTuple):
    """A drawn text token: what it adds to the document, from where to where, and its log-prob."""

    text: str
    start: int
    end: int
    logprob: float

    def cut(self, length: int) -> Drawn:
        """The token in a document of `length` characters."""
        return self if self.end <= length else self.saying(self.text[: max(0, length - self.start)])

    def saying(self, text: str) -> Drawn:
        """The same token with another text."""
        return Drawn(text, self.start, self.start + len(text), self.logprob)


class DocumentOrder:
    """Walks threads as the rendered text has them: a child stands where it was forked.

    `push` takes events in arrival order and returns the tokens that they settle. The last token
    before an annotation has what was left of its character when that ended it.
    """

    def __init__(self) -> None:
        self._items: dict[str, list[Token | ThreadEnd | str]] = {}
        self._stack: list[tuple[str, int]] = [(MAIN, 0)]
        self._length = 0
        self._held: Drawn | None = None  # without a character of its own, so far

    def push(self, events: Iterable[Event]) -> list[Drawn]:
        for event in events:
            match event:
                case Token() | ThreadEnd():
                    self._items[event.thread].append(event)
                case ThreadStart():
                    self._items[event.thread] = []
                    if event.parent is not None:
                        self._items[event.parent].append(event.thread)
                case _:
                    pass
        settled: list[Drawn] = []
        while self._stack:
            thread, at = self._stack.pop()
            items = self._items.get(thread, [])
            while at < len(items):
                item = items[at]
                at += 1
                if isinstance(item, str):
                    self._stack.append((thread, at))
                    thread, at, items = item, 0, self._items[item]
                    continue
                self._consume(item, settled)
                if isinstance(item, ThreadEnd):
                    break
            else:
                self._stack.append((thread, at))  # open: it may still write
                break
        return settled

    def _consume(self, item: Token | ThreadEnd, settled: list[Drawn]) -> None:
        held, self._held = self._held, None
        is_text = isinstance(item, Token) and not item.markup
        if held is not None:
            settled.append(held if is_text else held.saying(item.text))
        start = self._length
        self._length = end = start + len(item.text)
        if isinstance(item, Token) and is_text and is_drawn(item.origin):
            drawn = Drawn(item.text, start, end, item.logprob or 0.0)
            if item.text:
                settled.append(drawn)
            else:
                self._held = drawn
