"""What happens while a request decodes: one schema for CLI, server, web page and trace files.

Arrival order is the order of the events. Document order is recoverable too: a thread's text
belongs where its parent's text stood (`at`) when it started.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from stretto.trace import Origin


@dataclass(frozen=True, slots=True)
class ThreadStart:
    """A thread begins. `at`: length of the parent's own text (code points) where it belongs."""

    type: ClassVar[str] = "thread_start"
    thread: str
    parent: str | None
    topic: str | None
    at: int
    step: int


@dataclass(frozen=True, slots=True)
class Token:
    """A token was placed. `text` is what it adds to its thread's own text, maybe nothing.

    `segment` is the one it stands in, by the name that an eviction gives it.
    """

    type: ClassVar[str] = "token"
    thread: str
    index: int
    token: int
    text: str
    markup: bool
    origin: Origin
    position: int
    step: int
    logprob: float | None
    segment: int


@dataclass(frozen=True, slots=True)
class ThreadEnd:
    """A thread ended; `text` is what its last, incomplete character turned out to be.

    `logprob` is that of the end of sequence or stop id that it drew; None if it drew none.
    """

    type: ClassVar[str] = "thread_end"
    thread: str
    reason: str
    text: str
    step: int
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """From its next token on, `thread` sees what `children` wrote."""

    type: ClassVar[str] = "join"
    thread: str
    children: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """From its next token on, `thread` no longer sees `num_tokens` tokens of one segment."""

    type: ClassVar[str] = "evict"
    thread: str
    segment: int
    num_tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class Denoised:
    """A pass has written some tokens of a block, which is a segment of its thread.

    `indices` are their places among the `length` tokens to be written, from 0; `tokens` the ids
    there. `num_left` are still to be written. Pass 0 is the block's beginning, with nothing
    written. Once it is done its tokens follow as `Token`s, in order.
    """

    type: ClassVar[str] = "denoise"
    thread: str
    segment: int
    pass_number: int
    length: int
    indices: tuple[int, ...]
    tokens: tuple[int, ...]
    num_left: int
    step: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the finished request."""

    type: ClassVar[str] = "usage"
    usage: dict[str, int]


@dataclass(frozen=True, slots=True)
class Done:
    """The last event. `text` is the whole answer in document order."""

    type: ClassVar[str] = "done"
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed; the other requests go on."""

    type: ClassVar[str] = "error"
    message: str


Event = ThreadStart | Token | ThreadEnd | Joined | Evicted | Denoised | Usage | Done | Failed


def to_json(event: Event) -> dict[str, Any]:
    """An event as plain JSON values, its type first. They are the event's own, not copies."""
    names = [own.name for own in fields(event)]
    return {"type": event.type, **{name: getattr(event, name) for name in names}}


@dataclass(slots=True)
class EventLog:
    """Events of one request in arrival order, with what a reader has not taken yet."""

    events: list[Event] = field(default_factory=list)
    num_taken: int = 0

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def take(self) -> list[Event]:
        taken = self.events[self.num_taken :]
        self.num_taken = len(self.events)
        return taken
