"""What every dialect provides: a parser of annotated text, and a session that decodes.

A dialect maps tokens to moves (`stretto.effects`) and never touches visibility itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stretto.effects import Denoise, Move
from stretto.recorder import OpenThread, Recorder
from stretto.trace import Trace


@dataclass(frozen=True, slots=True)
class Issue:
    """Something malformed in an annotated text. `at`: offset in code points of what it is about."""

    code: str
    at: int


@dataclass(frozen=True)
class Parsed:
    """What an annotated text means. `text`: annotations removed, never the prompt."""

    trace: Trace
    text: str
    issues: tuple[Issue, ...]


@dataclass(frozen=True, eq=False)
class Legal:
    """Which ids a thread may draw next: `mask[id]`, of the vocabulary's size.

    `forced`: the thread's cap has left only these; the token counts as drawn, is no training
    target, and ends its thread with "length".
    """

    mask: NDArray[np.bool_]
    forced: bool = False


@dataclass(frozen=True, eq=False)
class BlockRules:
    """How a model of a dialect writes blocks: the ids of a token that is not written yet and of the
    filler, and what may stand in a block. Without a plan, `block` makes the number-th block, of so
    many tokens at a position, and `between` is what the runtime writes on main behind each."""

    mask: int
    filler: int
    legal: Legal
    main_role: str
    between: int
    block: Callable[[int, int, int], Denoise]


class Vocabulary(Protocol):
    """Text to ids and back, with every control token inert in text, and the control ids apart.

    `control` maps a dialect's names for its control tokens to single ids. `size` bounds the ids:
    the number of rows of the model's output head (ids that no token has are never legal).
    """

    control: Mapping[str, int]
    end_ids: frozenset[int]

    @property
    def size(self) -> int: ...

    @property
    def spare_ids(self) -> frozenset[int]:
        """Ids below `size` that no token has: never to be drawn."""
        ...

    @property
    def reasoning_end(self) -> int | None:
        """The id at which a model's reasoning ends and its answer begins; None: it has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a run of text: no prefix inserted, no special or control token recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a run of ids, without clean-up; a control id gives its text form."""
        ...


@runtime_checkable
class Session(Protocol):
    """One request's dialect state while it decodes. Called for one thread at a time.

    Every method reads threads and never changes them; changes are the returned moves, applied in
    order. A move list may hold a `Wait`: what follows it is held back until it is satisfied.
    """

    main_role: str
    budget: Callable[[], int]
    """How many tokens the request may still draw; the request sets it."""

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        """A token was drawn (never an end-of-sequence or stop id), and `thread.num_drawn` counts
        it already. Must place it, or close the thread in its stead: one that goes beyond what the
        session allows is counted as drawn, stands in no trace, and an issue names it."""
        ...

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        """The thread must end: it drew an end or stop id ("stop"), or reached its last position
        or its cap ("length"). Must end in a `Close`."""
        ...

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        """The request ends (budget, stop string, cancelled) with this thread open: a `Reveal` of
        what was tentative and injected text, which is never fed, may be returned. The caller
        closes the thread."""
        ...

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]] | None:
        """The annotated text form of what was written, and what was malformed in it; None if the
        rendered text is all there is."""
        ...

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal | None:
        """What the thread may draw next; None: anything. Ends of sequence are ids like others."""
        ...


@runtime_checkable
class ResumingSession(Session, Protocol):
    """A session whose moves may hold a `Resume`."""

    def resumed(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        """What the thread does now that the moves before its `Resume` are carried out."""
        ...
