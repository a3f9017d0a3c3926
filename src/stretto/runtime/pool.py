"""One pool of KV slots, shared by all threads of all requests.

Slots are handed out in pages of `page_size`. Every segment starts on a fresh page, so that it can
be given back whole. A fork copies nothing, a join moves nothing, a freed page is reusable at once.

Segments of several requests may hold the same pages, if these are full: a page is written by the
first that holds it and never again. What lies on a page that is *kept* stays there when nobody
holds it any more, until its room is needed: such a page is free, and cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import takewhile


class PoolError(AssertionError):
    """The pool's books do not add up: a bug of ours, never a user's mistake."""


class SlotList:
    """The slots of one segment in token order, on pages that no other segment writes to."""

    __slots__ = ("pages", "slots")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.slots: list[int] = []


class Pool:
    """Bookkeeping of `num_pages` pages of `page_size` slots; the tensors are the engine's.

    `order`: the order in which free pages are handed out, lowest rank first (tests shuffle it);
    by default the lowest page is used first, which keeps the used part of the pool short. Cached
    pages come last, the one that was given back first before the others. Where the pool
    `stays_low` that one comes before free pages of a higher rank: then the used part is never
    longer than the most that was held at once, whatever is cached.

    `on_reuse` is called with a cached page whose room is needed, and must `forget` it.
    """

    def __init__(
        self, num_pages: int, page_size: int = 1, order: Sequence[int] | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.stays_low = False
        self.on_reuse: Callable[[int], None] = self.forget
        self._by_rank = list(range(num_pages)) if order is None else list(order)
        self._rank = {page: rank for rank, page in enumerate(self._by_rank)}
        self._editions = [0] * num_pages
        self.reset()

    def reset(self) -> None:
        """Takes every page back, whatever the books say. Every list handed out is void, and
        nothing is kept."""
        self._free = list(range(self.num_pages))
        self._lists: dict[int, SlotList] = {}
        self._num_holders = [0] * self.num_pages
        self._kept: set[int] = set()
        self._cached: dict[int, None] = {}  # kept pages that nobody holds, oldest first

    @property
    def num_free_pages(self) -> int:
        """Pages that can be had at once, the cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_pages(self) -> int:
        """Free pages with something on them that is kept as long as their room is not needed."""
        return len(self._cached)

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
        if need > self.num_free_pages:
            raise PoolError(f"{need} pages needed, {self.num_free_pages} free")
        start, size = len(segment.slots), self.page_size
        if num_tokens and start % size and self._num_holders[segment.pages[-1]] > 1:
            raise PoolError(f"page {segment.pages[-1]} is held by others and would be written to")
        for _ in range(need):
            page = self._take()
            self._num_holders[page] = 1
            self._editions[page] += 1
            segment.pages.append(page)
        self._lists[id(segment)] = segment
        added = [
            segment.pages[i // size] * size + i % size for i in range(start, start + num_tokens)
        ]
        segment.slots += added
        return added

    def _take(self) -> int:
        """A page that nobody holds, to be written to."""
        oldest = next(iter(self._cached), None)
        if oldest is not None and (not self._free or self._is_preferred(oldest)):
            self.on_reuse(oldest)
        return self._by_rank[heapq.heappop(self._free)]

    def _is_preferred(self, cached: int) -> bool:
        return self.stays_low and self._rank[cached] < self._free[0]

    def free(self, segment: SlotList) -> None:
        """Gives a segment's pages back. Its slots are forgotten."""
        for page in reversed(segment.pages):  # of what is cached, the end goes first
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if page in self._kept:
                self._cached[page] = None
            else:
                heapq.heappush(self._free, self._rank[page])
        self._lists.pop(id(segment), None)
        segment.pages = []
        segment.slots = []

    # -- pages of several segments -------------------------------------------------------------

    def share(self, pages: Sequence[int]) -> SlotList:
        """A new segment's list, which holds these pages as others do: written, full, and held or
        cached."""
        size, segment = self.page_size, SlotList()
        segment.pages = list(pages)
        segment.slots = [page * size + i for page in pages for i in range(size)]
        for page in pages:
            self._num_holders[page] += 1
            self._cached.pop(page, None)
        self._lists[id(segment)] = segment
        return segment

    def keep(self, page: int) -> None:
        """What lies on a page that is held stays there, once it is free, while there is room."""
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """What lies on a page is not to be kept."""
        self._kept.discard(page)
        if page in self._cached:
            del self._cached[page]
            heapq.heappush(self._free, self._rank[page])

    @property
    def kept(self) -> frozenset[int]:
        """Pages of which what lies on them is to stay."""
        return frozenset(self._kept)

    def common_beginning(self, segment: SlotList) -> list[int]:
        """The pages that a segment begins with and others hold as well."""
        return list(takewhile(lambda page: self._num_holders[page] > 1, segment.pages))

    def edition(self, page: int) -> int:
        """Changes when a page is handed out to be written to."""
        return self._editions[page]

    def still_has(self, page: int, edition: int) -> bool:
        """Whether what lay on a page in this edition can still be shared."""
        is_there = self._num_holders[page] > 0 or page in self._cached
        return is_there and self._editions[page] == edition

    def num_cached(self, pages: Sequence[int]) -> int:
        """How many of these pages are cached: to hold them takes as many free ones."""
        return sum(page in self._cached for page in pages)

    # -- checks --------------------------------------------------------------------------------

    @property
    def num_holds(self) -> int:
        """Pages held, each as often as it is."""
        return sum(self._num_holders)

    def check_integrity(self) -> None:
        """Raises `PoolError` unless every page is free once, or cached once, or held by as many
        segments as have it."""
        held = [0] * self.num_pages
        for segment in self._lists.values():
            if len(segment.pages) != self.pages_for(len(segment.slots)):
                raise PoolError(f"{len(segment.slots)} slots on {len(segment.pages)} pages")
            for page in segment.pages:
                held[page] += 1
        if held != self._num_holders:
            raise PoolError(f"pages are held {held} times, {self._num_holders} in the books")
        free = [*(self._by_rank[rank] for rank in self._free), *self._cached]
        owned = [page for page, count in enumerate(held) if count]
        if sorted(owned + free) != list(range(self.num_pages)):
            raise PoolError(f"pages owned {owned} and free {sorted(free)} do not add up")
        if not self._kept.issuperset(self._cached):
            raise PoolError("a page is cached that nobody keeps")
