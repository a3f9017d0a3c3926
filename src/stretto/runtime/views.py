"""Views: what one thread may attend in the pool, as the page lists of whole segments.

A view is never rebuilt per token. It is the thread's own log of changes (`OpenThread.changes`)
over the request's slot lists; an engine follows the log with a cursor of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.recorder import OpenSegment, OpenThread
from stretto.runtime.attention import AttentionTotals
from stretto.runtime.memory import RequestMemory


@dataclass(slots=True, eq=False)
class View:
    """One thread's view into its request's memory. `cursor` belongs to the engine.

    If `attention` is not None the engine adds the attention mass of the view's rows to it. The
    tokens of an `is_reindexed` view are rotated to their places among those visible to a row.
    """

    thread: OpenThread
    memory: RequestMemory
    cursor: Any = None
    attention: AttentionTotals | None = None
    is_reindexed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive rows of one pass: tokens `start`, `start+1`, … of one segment.

    Their keys and values go to `slots`. They see what the view saw after `version` changes, and
    of their own segment what `visible` allows. `kept` are the rows, counted from the run's first
    and rising, whose logits are wanted.

    A run of a `block` holds all its tokens, which may have been fed before: what they then wrote
    into their slots is overwritten. Blocks that see one another are in the same pass.
    """

    view: View
    version: int
    segment: OpenSegment
    start: int
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    kept: tuple[int, ...]

    @property
    def num_logits(self) -> int:
        return len(self.kept)


@dataclass(slots=True, eq=False)
class Cursor:
    """The visible slots of one view as a bitmap, brought forward along its log of changes.

    It keeps hold of the slots it has set: by the time a change is followed, the pool may have
    taken them back. When all slots have moved (`epoch`) it must be made anew.
    """

    bitmap: NDArray[np.bool_]
    epoch: int
    version: int = 0
    seen: dict[int, list[int]] = field(default_factory=dict)
    own: int = -1
    own_slots: list[int] = field(default_factory=list)
    num_own: int = 0

    def advance(self, view: View, version: int, own: int, start: int) -> None:
        """Brings the bitmap to `version`, with the first `start` slots of segment `own`.

        What is hidden is cleared first: its slots may already be another segment's.
        """
        changes = view.thread.changes[self.version : version]
        self.version = version
        hidden = {handle for what, handle in changes if what == "hide"}
        for handle in hidden & self.seen.keys():
            self.bitmap[self.seen.pop(handle)] = False
        if self.own in hidden:
            self.bitmap[self.own_slots[: self.num_own]] = False
        for what, handle in changes:
            if what == "hide" or handle in hidden:
                continue
            if handle == self.own:
                self.seen[handle] = self.own_slots
                self.bitmap[self.own_slots[self.num_own :]] = True
            else:
                slots = self.seen[handle] = view.memory.slots[handle].slots
                self.bitmap[slots] = True
        if own != self.own:
            self.own, self.own_slots, self.num_own = own, view.memory.slots[own].slots, 0
        if self.num_own < start:
            self.bitmap[self.own_slots[self.num_own : start]] = True
        self.num_own = start

    def extend(self, slots: list[int]) -> None:
        """The next slots of the own segment become visible."""
        self.bitmap[slots] = True
        self.num_own += len(slots)


@dataclass(slots=True, eq=False)
class ListCursor:
    """The visible slots of one view in trace order, brought forward along its log of changes.

    Trace order is a function of the trace alone: the segments seen by handle, then the own one.
    `slots[:length]` are the slots that the next row sees besides those of its own run; their
    memory begins at `hand_out()`. A list that was handed out stays as it is, and alive, until it
    is taken back: changes go into a copy.
    """

    epoch: int
    slots: NDArray[np.int32] = field(default_factory=lambda: np.empty(256, dtype=np.int32))
    length: int = 0
    version: int = 0
    handed: list[NDArray[np.int32]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # where each segment of `order` ends
    own: int = -1
    num_own: int = 0

    def advance(self, view: View, version: int, own: int, start: int) -> None:
        """Brings the list to `version`, with the first `start` slots of segment `own` at its end.

        Nothing is read of what is no longer visible: its slots may be another segment's by now.
        """
        changes = view.thread.changes[self.version : version]
        self.version = version
        if changes or own != self.own or self.num_own != start:
            visible = set(self.order)
            for what, handle in changes:
                (visible.discard if what == "hide" else visible.add)(handle)
            self._rewrite(view.memory, sorted(visible), own, start)

    def extend(self, slots: list[int]) -> None:
        """The next slots of the own segment are appended."""
        end = self.length + len(slots)
        self._reserve(end)
        self.slots[self.length : end] = slots
        self.length = end
        self.num_own += len(slots)

    def hand_out(self) -> int:
        """The address of the list, which is good until `take_back`."""
        if not self.handed or self.handed[-1] is not self.slots:
            self.handed.append(self.slots)
        return int(self.slots.__array_interface__["data"][0])

    def take_back(self) -> None:
        """Nobody reads the handed lists any more."""
        self.handed.clear()

    def _rewrite(self, memory: RequestMemory, order: list[int], own: int, start: int) -> None:
        same = 0
        for a, b in zip(order, self.order, strict=False):
            if a != b:
                break
            same += 1
        if self.handed and self.handed[-1] is self.slots:
            self.slots = self.slots.copy()
        del self.order[same:], self.ends[same:]
        self.length = self.ends[-1] if self.ends else 0
        for handle in order[same:]:
            self.extend(memory.slots[handle].slots)
            self.order.append(handle)
            self.ends.append(self.length)
        self.own, self.num_own = own, 0
        self.extend(memory.slots[own].slots[:start])

    def _reserve(self, size: int) -> None:
        if size > len(self.slots):
            grown = np.empty(2 * size, dtype=np.int32)
            grown[: self.length] = self.slots[: self.length]
            self.slots = grown


def mask_rows(runs: list[Run], num_slots: int) -> NDArray[np.bool_]:
    """Rows x slots: which pool slots each row of a pass may attend.

    The plain form of `trace.visible` in slots. Columns end at the last slot any row sees.
    """
    rows = np.empty((sum(len(r.tokens) for r in runs), num_slots), dtype=np.bool_)
    at = 0
    for run in runs:
        cursor = run.view.cursor
        if cursor is None or cursor.epoch != run.view.memory.epoch:
            cursor = Cursor(np.zeros(num_slots, dtype=np.bool_), run.view.memory.epoch)
            run.view.cursor = cursor
        cursor.advance(run.view, run.version, run.segment.handle, run.start)
        n = len(run.tokens)
        block = rows[at : at + n]
        block[:] = cursor.bitmap
        sees_own = np.ones((n, n), dtype=np.bool_)
        block[:, run.slots] = sees_own if run.segment.kind == "block" else np.tril(sees_own)
        cursor.extend(run.slots)
        at += n
    width = int(np.flatnonzero(rows.any(axis=0))[-1]) + 1
    return rows[:, :width]


def runs_of(
    view: View,
    segments: list[OpenSegment],
    limit: int,
    wants_logits: bool,
    block_rows: tuple[int, ...] = (),
) -> list[Run]:
    """The runs that feed a thread's first `limit` unfed tokens; their slots must be allocated.

    Wanted are the logits of its last token, or those of `block_rows` of its block.
    """
    unfed = view.thread.unfed[:limit]
    whole = len(unfed) == len(view.thread.unfed)
    runs: list[Run] = []
    for (handle, version), group in groupby(unfed, lambda u: (u.segment, u.view_version)):
        own = list(group)
        start, stop = own[0].index, own[-1].index + 1
        segment = segments[handle]
        is_block = segment.kind == "block"
        is_last = wants_logits and whole and own[-1] is unfed[-1]
        runs.append(
            Run(
                view=view,
                version=len(view.thread.changes) if is_block else version,
                segment=segment,
                start=start,
                tokens=segment.tokens[start:stop],
                positions=segment.positions[start:stop],
                slots=view.memory.slots[handle].slots[start:stop],
                kept=block_rows if is_block else (len(own) - 1,) if is_last else (),
            )
        )
    return runs
