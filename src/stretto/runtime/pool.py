"""One pool of KV slots, shared by all threads of all requests.

Slots are handed out in pages of `page_size`. Every segment starts on a fresh page, so that it can
be given back whole. A fork copies nothing, a join moves nothing, a freed page is reusable at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class PoolError(AssertionError):
    """The pool's books do not add up: a bug of ours, never a user's mistake."""


class SlotList:
    """The slots of one segment in token order, on pages it owns alone."""

    __slots__ = ("pages", "slots")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.slots: list[int] = []


class Pool:
    """Bookkeeping of `num_pages` pages of `page_size` slots; the tensors are the engine's.

    `order`: the order in which free pages are handed out, lowest rank first (tests shuffle it);
    by default the lowest page is used first, which keeps the used part of the pool short.
    """

    def __init__(
        self, num_pages: int, page_size: int = 1, order: Sequence[int] | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._by_rank = list(range(num_pages)) if order is None else list(order)
        self._rank = {page: rank for rank, page in enumerate(self._by_rank)}
        self._free = list(range(num_pages))
        self._lists: dict[int, SlotList] = {}

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a fresh segment of `num_tokens` takes."""
        return -(-num_tokens // self.page_size)

    def pages_to_extend(self, segment: SlotList, num_tokens: int) -> int:
        """Free pages needed to append `num_tokens` to a segment."""
        return self.pages_for(len(segment.slots) + num_tokens) - len(segment.pages)

    def extend(self, segment: SlotList, num_tokens: int) -> list[int]:
        """Appends `num_tokens` slots to a segment and returns them. Enough pages must be free."""
        need = self.pages_to_extend(segment, num_tokens)
        if need > len(self._free):
            raise PoolError(f"{need} pages needed, {len(self._free)} free")
        for _ in range(need):
            segment.pages.append(self._by_rank[heapq.heappop(self._free)])
        self._lists[id(segment)] = segment
        start = len(segment.slots)
        size = self.page_size
        added = [
            segment.pages[i // size] * size + i % size for i in range(start, start + num_tokens)
        ]
        segment.slots += added
        return added

    def free(self, segment: SlotList) -> None:
        """Gives a segment's pages back. Its slots are forgotten."""
        for page in segment.pages:
            heapq.heappush(self._free, self._rank[page])
        self._lists.pop(id(segment), None)
        segment.pages = []
        segment.slots = []

    def reset(self) -> None:
        """Takes every page back, whatever the books say. Every list handed out is void."""
        self._free = list(range(self.num_pages))
        self._lists = {}

    def check_integrity(self) -> None:
        """Raises `PoolError` unless every page is either free once or owned by one segment."""
        owned = [page for segment in self._lists.values() for page in segment.pages]
        free = [self._by_rank[rank] for rank in self._free]
        if sorted(owned + free) != list(range(self.num_pages)):
            raise PoolError(f"pages owned {sorted(owned)} and free {sorted(free)} do not add up")
        for segment in self._lists.values():
            if len(segment.pages) != self.pages_for(len(segment.slots)):
                raise PoolError(f"{len(segment.slots)} slots on {len(segment.pages)} pages")
