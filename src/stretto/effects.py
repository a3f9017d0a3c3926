"""What a token can change: the only ways in which visibility changes, for every dialect.

A dialect answers each token with a list of moves. Most are effects on visibility; `Place` puts
the token (or one the runtime adds) at its thread's next position, before or after the effects.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.trace import Origin


@dataclass(frozen=True, slots=True)
class Cut:
    """The thread goes on in a new segment that sees the old one.

    `position` is the new segment's first position, None for the next one; `role` renames the
    part the thread plays from here on.
    """

    position: int | None = None
    role: str | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Cuts the parent; the child sees what the parent sees, the segment just cut included.

    The child's first tokens, `inject`, start at `position` (None: the parent's next one); of
    these the first `inject_markup` (None: all) are markup. The child may draw `cap` tokens (None:
    no cap of its own). The parent goes on at `resume` (None: its next position). A child
    with `joins` False is never joined, so what it wrote is released as it ends.
    """

    child: str
    inject: tuple[int, ...] = ()
    position: int | None = None
    cap: int | None = None
    resume: int | None = None
    topic: str | None = None
    role: str = "child"
    inject_markup: int | None = None
    joins: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """The thread's further moves are held back until all `children` are closed."""

    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """The thread's next segment also sees what the children wrote and still see at their ends.

    With `rebase` its next position is 1 + the largest position then visible to it. A join neither
    revives nor hides anything else.
    """

    children: tuple[str, ...]
    rebase: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    """Later segments of the acting thread stop seeing `segment` (a recorder handle).

    No other thread's view changes. Cuts the thread if its open segment has tokens.
    """

    segment: int


@dataclass(frozen=True, slots=True)
class Denoise:
    """A thread that is one block segment: `length` tokens that are to be written, in any order,
    over several passes, between the `before` and `after` that the runtime writes.

    Cuts the parent; the child sees what the parent sees, the segment just cut included. Its first
    token stands at `position`, the parent goes on behind its last one. With `dense` it and the
    blocks that the parent has forked at the same place, and that are open, also see one another. A
    token that is not written yet is a `mask`. If `shifted`, a token is predicted by the row before
    it, else by its own. A `filler`, if there is one, is markup when drawn; the first of the `ends`
    is, and all that stands behind it. When all is written its keys and values are computed once
    more, from the tokens that then stand there, before anyone sees it.
    """

    child: str
    length: int
    position: int
    dense: bool = False
    mask: int = 0
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    shifted: bool = False
    filler: int | None = None
    ends: frozenset[int] = frozenset()
    topic: str | None = None
    role: str = "child"


@dataclass(frozen=True, slots=True)
class Close:
    """The thread ends for `reason`: stop, length, cancelled or error."""

    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """Puts a token at the thread's next position.

    `markup` tokens are not part of the text. `tentative` ones are markup for now and may yet turn
    out to be text: the text is not settled beyond them.
    """

    token: int
    origin: Origin = "sampled"
    markup: bool = False
    tentative: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """The thread's session is asked what the thread does next (`ResumingSession.resumed`): after a
    `Wait`, where that depends on what was written."""


@dataclass(frozen=True, slots=True)
class Reveal:
    """The thread's last `count` tokens, held to be markup until now, are text after all."""

    count: int


Effect = Cut | Fork | Wait | Join | Evict | Denoise | Close
Move = Effect | Place | Reveal | Resume
