"""The slots one request holds: segment by segment, shared by its threads, or copied out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stretto.runtime.pool import Pool, SlotList

if TYPE_CHECKING:
    from stretto.engines.base import Engine

Lengths = Mapping[int, int]
"""By segment handle, how many tokens it is to have slots for."""


class RequestMemory:
    """Slots of one request's segments. `epoch` changes when they move, after a preemption."""

    def __init__(self) -> None:
        self.slots: dict[int, SlotList] = {}
        self.epoch = 0
        self.num_pages = 0
        self.peak_pages = 0
        self._kept: tuple[list[tuple[SlotList, int]], Any] | None = None

    def pages_needed(self, pool: Pool, rows: Iterable[Lengths]) -> int:
        """Free pages that growing segments to these lengths takes."""
        fresh = SlotList()
        held = (
            (self.slots.get(handle, fresh), length)
            for lengths in rows
            for handle, length in lengths.items()
        )
        return sum(pool.pages_to_extend(s, max(0, n - len(s.slots))) for s, n in held)

    def extend(self, pool: Pool, rows: Iterable[Lengths]) -> None:
        """Appends slots to segments up to these lengths. Enough pages must be free."""
        for lengths in rows:
            for handle, length in lengths.items():
                slots = self.slots.setdefault(handle, SlotList())
                before = len(slots.pages)
                pool.extend(slots, max(0, length - len(slots.slots)))
                self.num_pages += len(slots.pages) - before
        self.peak_pages = max(self.peak_pages, self.num_pages)

    def free(self, pool: Pool, handles: Iterable[int] | None = None) -> None:
        """Gives back the pages of some segments; None: of all, and any copy made of them."""
        if handles is None:
            handles = list(self.slots)
            self._kept = None
        for handle in handles:
            slots = self.slots.get(handle)
            if slots is not None and slots.pages:
                self.num_pages -= len(slots.pages)
                pool.free(slots)

    def save(self, engine: Engine, pool: Pool) -> None:
        """Copies all KV out and gives all pages back."""
        lists = [s for s in self.slots.values() if s.slots]
        kept = engine.copy_out([slot for s in lists for slot in s.slots])
        self._kept = [(s, len(s.slots)) for s in lists], kept
        for slots in lists:
            pool.free(slots)
        self.num_pages = 0

    def pages_to_restore(self, pool: Pool) -> int:
        return sum(pool.pages_for(n) for _, n in self._kept[0]) if self._kept is not None else 0

    def restore(self, engine: Engine, pool: Pool) -> None:
        """Puts what `save` copied out back, bit for bit, into whatever slots are free."""
        if self._kept is None:
            return
        lists, kept = self._kept
        engine.copy_in([slot for segment, n in lists for slot in pool.extend(segment, n)], kept)
        self.num_pages = sum(len(segment.pages) for segment, _ in lists)
        self._kept = None
        self.epoch += 1
