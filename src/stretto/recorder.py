"""The recorder grows a trace: the one place where moves become segments, views and positions.

Parsing an annotated text and decoding with a model drive the same recorder, so a model runs under
exactly the visibility it was trained under. It knows no dialect and no tensor.

While decoding, a token is first placed and later *fed* to the model. The recorder keeps what is
unfed, tells which segments nobody can see any more (`released`), and logs each view's changes so
that an engine can follow them without rebuilding anything.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from stretto.effects import Cut, Denoise, Effect, Evict, Fork, Join, Place, Reveal
from stretto.idset import IdSet
from stretto.trace import Kind, Origin, Segment, Thread, Trace

MAIN = "main"


@dataclass(slots=True, eq=False)
class OpenSegment:
    """A segment under way. `handle` is its index in the recorder, stable while it decodes."""

    handle: int
    thread: str
    kind: Kind
    role: str
    sees: int = 0  # handles as bits
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    markup: list[bool] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    viewers: int = 0
    released: bool = False
    seen: ViewChange | None = None
    num_passes: int = 0
    group: int | None = None
    """Of a block: the first of those that see one another, which are fed in one pass; else None."""


ViewChange = tuple[Literal["see", "hide", "cut"], int]
"""see/hide: a whole segment enters or leaves the view. cut: the own segment is closed, and seen."""


@dataclass(slots=True, frozen=True)
class Unfed:
    """A placed token the model has not consumed: its segment, index, and the view it had then.

    `order` counts placements over all threads: a token sees only tokens of lower order (or of its
    own block), so feeding in this order never reads what is not written yet.
    """

    segment: int
    index: int
    view_version: int
    order: int


@dataclass(slots=True, eq=False)
class OpenThread:
    """A thread under way. `bits` are the segments its next token sees besides `own`."""

    name: str
    parent: str | None
    topic: str | None
    role: str
    next_position: int
    own: OpenSegment
    cap: int | None = None
    joins: bool = True
    bits: int = 0  # handles as bits
    segments: list[int] = field(default_factory=list)
    changes: list[ViewChange] = field(default_factory=list)
    unfed: list[Unfed] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    claims: dict[str, list[int]] = field(default_factory=dict)
    num_drawn: int = 0
    num_tentative: int = 0
    is_stale: bool = False
    """Whether it is a block whose keys and values are not those of the tokens that it has now."""
    finish_reason: str | None = None

    @property
    def sees(self) -> IdSet:
        """Handles of the segments its next token sees besides `own`; none once it is closed."""
        return IdSet(bits=self.bits)

    @property
    def is_open(self) -> bool:
        return self.finish_reason is None

    @property
    def remaining(self) -> int | None:
        """How many tokens the thread may still draw under its own cap; None without one."""
        return None if self.cap is None else self.cap - self.num_drawn


class Recorder:
    """Applies moves to threads and remembers everything needed for the trace.

    `max_positions`: model positions; a token that would lie beyond stands at the last one, and
    `at_last_position` tells that its thread must end. None: no limit. `cuts`: indices of prompt
    tokens that begin a new segment.
    """

    def __init__(
        self,
        prompt: list[int],
        role: str,
        max_positions: int | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        self.max_positions = max_positions
        self.segments: list[OpenSegment] = []
        self.threads: dict[str, OpenThread] = {}
        self.released: list[int] = []
        self.entries_touched = 0
        self.num_revealed = 0
        self.num_placed = 0
        self.num_unfed = 0
        own = self._new_segment(MAIN, "prompt")
        main = self.threads[MAIN] = OpenThread(MAIN, None, None, "prompt", 0, own)
        self._adopt(main, own)
        bounds = [0, *sorted({i for i in cuts if 0 < i < len(prompt)}), len(prompt)]
        for start, end in itertools.pairwise(bounds):
            self.cut(main, Cut())
            self._place_prompt(main, prompt[start:end])
        self.cut(main, Cut(role=role))

    # -- moves ---------------------------------------------------------------------------------

    def place(self, thread: OpenThread, move: Place, step: int | None = None) -> OpenSegment:
        """Puts a token at the thread's next position, in its open segment."""
        own = thread.own
        if not own.tokens:
            own.sees = thread.bits
            own.role = thread.role
        position = thread.next_position
        if self.max_positions is not None:
            position = min(position, self.max_positions - 1)
        own.tokens.append(move.token)
        own.positions.append(position)
        own.origins.append(move.origin)
        own.markup.append(move.markup)
        own.steps.append(step)
        thread.next_position = position + 1
        thread.num_tentative = thread.num_tentative + 1 if move.tentative else 0
        unfed = Unfed(own.handle, len(own.tokens) - 1, len(thread.changes), self.num_placed)
        thread.unfed.append(unfed)
        self.num_placed += 1
        self.num_unfed += 1
        self.entries_touched += 1
        return own

    def _place_prompt(self, thread: OpenThread, tokens: list[int]) -> None:
        """`place` of each of these tokens of the prompt, in one go."""
        own, count = thread.own, len(tokens)
        if not count:
            return
        own.sees, own.role = thread.bits, thread.role
        last = sys.maxsize if self.max_positions is None else self.max_positions - 1
        first, index, version = thread.next_position, len(own.tokens), len(thread.changes)
        own.tokens += tokens
        own.positions += [min(first + i, last) for i in range(count)]
        own.origins += ["prompt"] * count
        own.markup += [True] * count
        own.steps += [None] * count
        thread.next_position = own.positions[-1] + 1
        thread.unfed.extend(
            Unfed(own.handle, index + i, version, self.num_placed + i) for i in range(count)
        )
        self.num_placed += count
        self.num_unfed += count
        self.entries_touched += count

    def mend(self) -> None:
        """Takes back a token whose placing was interrupted, so that what there is can be read."""
        for s in self.segments:
            length = len(s.steps)  # what `place` appends to last
            del s.tokens[length:], s.positions[length:], s.origins[length:], s.markup[length:]

    def at_last_position(self, thread: OpenThread) -> bool:
        return self.max_positions is not None and thread.next_position >= self.max_positions

    def reveal(self, thread: OpenThread, move: Reveal) -> None:
        """Turns the thread's last tokens into text, across segments if need be."""
        left = move.count
        for handle in reversed(thread.segments):
            markup = self.segments[handle].markup
            for i in range(len(markup) - 1, -1, -1):
                if not left:
                    break
                markup[i] = False
                left -= 1
        thread.num_tentative = 0
        self.num_revealed += move.count

    def apply(self, thread: OpenThread, effect: Effect) -> None:
        """Applies an effect other than Wait and Close, which are the scheduler's to honour."""
        match effect:
            case Cut():
                self.cut(thread, effect)
            case Fork():
                self.fork(thread, effect)
            case Denoise():
                self.denoise(thread, effect)
            case Join():
                self.join(thread, effect)
            case Evict():
                self.evict(thread, effect.segment)
            case _:
                raise TypeError(f"the recorder does not apply {effect!r}")

    def cut(self, thread: OpenThread, effect: Cut) -> None:
        if thread.own.tokens:
            old, new = thread.own, self._new_segment(thread.name, thread.role)
            thread.bits |= 1 << old.handle
            self._log(thread, "cut", old.handle)
            thread.own = new
            self._adopt(thread, new)
        if effect.role is not None:
            thread.role = effect.role
        if effect.position is not None:
            thread.next_position = effect.position

    def fork(self, parent: OpenThread, effect: Fork) -> OpenThread:
        """Opens the child and places its injected tokens; returns it."""
        if effect.child in self.threads:
            raise ValueError(f"thread {effect.child!r} exists already")
        position = parent.next_position if effect.position is None else effect.position
        forked_at = self._forking_segment(parent)
        self.cut(parent, Cut(position=effect.resume))
        own = self._new_segment(effect.child, effect.role)
        child = OpenThread(
            effect.child, parent.name, effect.topic, effect.role, position, own,
            cap=effect.cap, joins=effect.joins,
        )  # fmt: skip
        self._begin(child, parent, forked_at)
        num_markup = len(effect.inject) if effect.inject_markup is None else effect.inject_markup
        for i, token in enumerate(effect.inject):
            self.place(child, Place(token, "injected", markup=i < num_markup))
        return child

    def open_block(self, parent: OpenThread, effect: Denoise) -> OpenThread:
        """Opens the child of a `Denoise` without any token, and returns it; the parent goes on
        behind the place for all of them."""
        if effect.child in self.threads:
            raise ValueError(f"thread {effect.child!r} exists already")
        size = len(effect.before) + effect.length + len(effect.after)
        forked_at = self._forking_segment(parent)
        self.cut(parent, Cut(position=effect.position + size))
        own = self._new_segment(effect.child, effect.role, "block")
        child = OpenThread(
            effect.child, parent.name, effect.topic, effect.role, effect.position, own
        )
        siblings = [self.threads[name] for name in forked_at.children] if effect.dense else []
        siblings = [s for s in siblings if s.own.group is not None and s.is_open]
        own.group = siblings[0].own.group if siblings else own.handle
        self._begin(child, parent, forked_at)
        for sibling in siblings:
            self._see(child, sibling.own.handle)
            self._see(sibling, own.handle)
            sibling.own.sees = sibling.bits
        return child

    def denoise(self, parent: OpenThread, effect: Denoise) -> OpenThread:
        """Opens the child and places its tokens, which may then be rewritten; returns it."""
        child = self.open_block(parent, effect)
        masks = (effect.mask,) * effect.length
        for token in (*effect.before, *masks, *effect.after):
            self.place(child, Place(token, "injected", markup=True))
        child.is_stale = True
        return child

    def rewrite(
        self, thread: OpenThread, index: int, token: int, *, origin: Origin, markup: bool,
        step: int | None,
    ) -> None:  # fmt: skip
        """Writes token `index` of the thread's block."""
        own = thread.own
        own.tokens[index], own.origins[index] = token, origin
        own.markup[index], own.steps[index] = markup, step
        self.entries_touched += 1

    def refeed(self, thread: OpenThread) -> None:
        """The tokens of the thread's block are to be fed, all of them and as they are now."""
        if thread.unfed:
            raise ValueError(f"thread {thread.name!r} is fed again before it is fed")
        own, version = thread.own, len(thread.changes)
        count = len(own.tokens)
        thread.unfed += [Unfed(own.handle, i, version, self.num_placed + i) for i in range(count)]
        self.num_placed += count
        self.num_unfed += count

    def join(self, parent: OpenThread, effect: Join) -> None:
        self.cut(parent, Cut())
        for name in effect.children:
            child = self.threads[name]
            if child.is_open:
                raise ValueError(f"thread {name!r} is joined before it is closed")
            if child.is_stale:
                child.is_stale = False
                if not child.unfed:  # what was cut off before it was fed is fed as it is now
                    self.refeed(child)
            for handle in parent.claims.pop(name, ()):
                self._see(parent, handle)
                self._drop_viewer(handle)
        if effect.rebase:
            seen = [max(self.segments[h].positions, default=-1) for h in parent.sees]
            parent.next_position = 1 + max(seen, default=-1)

    def evict(self, thread: OpenThread, handle: int) -> None:
        if handle == thread.own.handle or handle not in thread.sees:
            raise ValueError(f"thread {thread.name!r} evicts segment {handle}, which it cannot see")
        self.cut(thread, Cut())
        thread.bits &= ~(1 << handle)
        self._log(thread, "hide", handle)
        self._let_go(thread, handle)

    def close(self, thread: OpenThread, reason: str) -> None:
        """Ends a thread. What it wrote stays claimed while its parent may still join it."""
        if not thread.is_open:
            return
        thread.finish_reason = reason
        parent = self.threads[thread.parent] if thread.parent is not None else None
        if parent is not None and parent.is_open and thread.joins:
            sees = thread.sees
            kept = [h for h in thread.segments if h in sees]
            kept += [thread.own.handle] if thread.own.tokens else []
            parent.claims[thread.name] = kept
            for handle in kept:
                self.segments[handle].viewers += 1
        for handle in [*thread.sees, thread.own.handle]:
            self._let_go(thread, handle)
        thread.bits = 0
        for name, handles in thread.claims.items():
            for handle in handles:
                self._drop_viewer(handle)
            self._settle(self.threads[name])
        thread.claims.clear()
        if parent is None or not parent.is_open:
            self._settle(thread)

    # -- feeding -------------------------------------------------------------------------------

    def fed(self, thread: OpenThread, count: int) -> None:
        """The model has consumed the thread's first `count` unfed tokens."""
        self.num_unfed -= min(count, len(thread.unfed))
        del thread.unfed[:count]
        if not (thread.unfed or thread.is_stale):
            self._forget_view(thread)

    def take_released(self) -> list[int]:
        """Handles of segments that no open thread and no pending join can see any more."""
        released, self.released = self.released, []
        return released

    # -- reading -------------------------------------------------------------------------------

    def document_order(self) -> Iterator[OpenSegment]:
        """Non-empty segments: a thread's in order, forked threads after where they forked."""
        stack = [iter(self.threads[MAIN].segments)]
        while stack:
            handle = next(stack[-1], None)
            if handle is None:
                stack.pop()
                continue
            segment = self.segments[handle]
            if segment.tokens:
                yield segment
            for child in reversed(segment.children):
                stack.append(iter(self.threads[child].segments))

    def freeze(self) -> Trace:
        """The trace so far, segments renumbered in document order."""
        order = list(self.document_order())
        seen = self._seen_ids(order)
        segments = tuple(
            Segment(
                id=i,
                thread=s.thread,
                kind=s.kind,
                role=s.role,
                sees=IdSet(bits=seen[i]),
                tokens=tuple(s.tokens),
                positions=tuple(s.positions),
                origins=tuple(s.origins),
                markup=tuple(s.markup),
                steps=tuple(s.steps),
                num_passes=s.num_passes,
            )
            for i, s in enumerate(order)
        )
        threads = tuple(
            Thread(t.name, t.parent, t.topic, t.finish_reason) for t in self.threads.values()
        )
        return Trace(segments, threads)

    def _seen_ids(self, order: list[OpenSegment]) -> list[int]:
        """What each segment of a document sees, as bits of document ids.

        Handles are translated where a segment's view differs from that of its thread's segment
        before, or for a thread's first, of the segment before it in the document.
        """
        ids = {s.handle: i for i, s in enumerate(order)}
        before: dict[str, tuple[int, int]] = {}
        last = (0, 0)
        seen = []
        for segment in order:
            handles, bits = before.get(segment.thread, last)
            for handle in IdSet(bits=handles ^ segment.sees):
                if handle in ids:
                    bits ^= 1 << ids[handle]
            last = before[segment.thread] = segment.sees, bits
            seen.append(bits)
        return seen

    # -- internals -----------------------------------------------------------------------------

    def _new_segment(self, thread: str, role: str, kind: Kind = "causal") -> OpenSegment:
        segment = OpenSegment(len(self.segments), thread, kind, role)
        self.segments.append(segment)
        return segment

    def _forking_segment(self, parent: OpenThread) -> OpenSegment:
        """The segment after which a thread that the parent forks now stands in the document."""
        at_own = parent.own.tokens or len(parent.segments) == 1
        return parent.own if at_own else self.segments[parent.segments[-2]]

    def _begin(self, child: OpenThread, parent: OpenThread, forked_at: OpenSegment) -> None:
        """Enters a child with a view of what its parent sees."""
        self.threads[child.name] = child
        forked_at.children.append(child.name)
        child.bits = parent.bits
        for handle in parent.sees:
            self._comes_into_view(child, handle)
        self._adopt(child, child.own)

    def _settle(self, thread: OpenThread) -> None:
        """Nobody will see the closed thread: what it has written is not fed once more."""
        if thread.is_stale:
            thread.is_stale = False
            if not thread.unfed:
                self._forget_view(thread)

    def _forget_view(self, thread: OpenThread) -> None:
        """All is fed: what the thread has stopped seeing is let go."""
        for handle in thread.deferred:
            self._drop_viewer(handle)
        thread.deferred.clear()
        if not thread.is_open:
            thread.changes.clear()

    def _adopt(self, thread: OpenThread, own: OpenSegment) -> None:
        thread.segments.append(own.handle)
        own.viewers += 1

    def _see(self, thread: OpenThread, handle: int) -> None:
        if not thread.bits >> handle & 1:
            thread.bits |= 1 << handle
            self._comes_into_view(thread, handle)

    def _comes_into_view(self, thread: OpenThread, handle: int) -> None:
        segment = self.segments[handle]
        segment.viewers += 1
        change = segment.seen or ("see", handle)
        segment.seen = change  # one object for all views: a long answer logs it very often
        thread.changes.append(change)
        self.entries_touched += 1

    def _log(self, thread: OpenThread, what: Literal["hide", "cut"], handle: int) -> None:
        thread.changes.append((what, handle))
        self.entries_touched += 1

    def _let_go(self, thread: OpenThread, handle: int) -> None:
        """The thread stops seeing a segment, once what it has placed before is fed."""
        if thread.unfed or thread.is_stale:
            thread.deferred.append(handle)
        else:
            self._drop_viewer(handle)

    def _drop_viewer(self, handle: int) -> None:
        segment = self.segments[handle]
        segment.viewers -= 1
        if segment.viewers == 0 and not segment.released:
            segment.released = True
            self.released.append(handle)
