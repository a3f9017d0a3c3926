"""The slots one request holds: segment by segment, shared by its threads, or copied out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stretto.runtime.pool import Pool, SlotList

if TYPE_CHECKING:
    from stretto.engines.base import Engine

Lengths = Mapping[int, int]
"""By segment handle, how many tokens it is to have slots for."""


class RequestMemory:
    """Slots of one request's segments. `epoch` changes when they move, after a preemption.

    `on_leaving` is called once, before the last of them are given back, unless what belongs there
    has been copied out and was never put back. `num_adopted` counts tokens
    whose keys and values were there before the request. `mean_pages` and `peak_pages` are of the
    passes that it has had slots for.
    """

    def __init__(self) -> None:
        self.slots: dict[int, SlotList] = {}
        self.epoch = 0
        self.num_pages = 0
        self.peak_pages = 0
        self._page_passes = 0
        self._num_passes = 0
        self.num_adopted = 0
        self.on_leaving: Callable[[], None] | None = None
        self._kept: tuple[list[tuple[SlotList, int]], Any] | None = None

    @property
    def mean_pages(self) -> float:
        """Pages held, over the passes so far; 0.0 before the first."""
        return self._page_passes / self._num_passes if self._num_passes else 0.0

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
        """Appends slots to segments up to these lengths, for one pass. Enough pages must be
        free."""
        for lengths in rows:
            for handle, length in lengths.items():
                slots = self.slots.setdefault(handle, SlotList())
                before = len(slots.pages)
                pool.extend(slots, max(0, length - len(slots.slots)))
                self.num_pages += len(slots.pages) - before
        self.peak_pages = max(self.peak_pages, self.num_pages)
        self._page_passes += self.num_pages
        self._num_passes += 1

    def adopt(self, pool: Pool, handle: int, pages: Sequence[int]) -> int:
        """A segment without slots begins with pages that others have written; how many tokens
        these hold."""
        slots = self.slots[handle] = pool.share(pages)
        self.num_pages += len(pages)
        self.peak_pages = max(self.peak_pages, self.num_pages)
        self.num_adopted += len(slots.slots)
        self.epoch += 1  # an engine has yet to learn of the segment's slots so far
        return len(slots.slots)

    def free(self, pool: Pool, handles: Iterable[int] | None = None) -> None:
        """Gives back the pages of some segments; None: of all, and any copy made of them."""
        if handles is None:
            leaving, self.on_leaving = self.on_leaving, None
            if leaving is not None and self._kept is None:
                leaving()
            handles = list(reversed(self.slots))  # of what is cached, the beginning goes last
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
