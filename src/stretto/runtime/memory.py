"""The slots one request holds: segment by segment, shared by its threads, or copied out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto.runtime.pool import Pool, SlotList

if TYPE_CHECKING:
    from stretto.engines.base import Engine

Lengths = Mapping[int, int]
"""By segment handle, how many tokens it is to have slots for."""

PROMPT = 0
"""Handle of the segment that a request begins with."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What a request held when it was preempted: tokens by segment handle.

    The prompt's first `pages`, each with its edition, were others' too: they need not be put back
    as long as they are there. `begin` is what lay on them, `rest` on all other pages.
    """

    lengths: Mapping[int, int]
    pages: tuple[tuple[int, int], ...]
    begin: Any
    rest: Any

    def still_shared(self, pool: Pool) -> list[int]:
        """The pages that can be held again as they are: all of them, or none."""
        is_there = all(pool.still_has(page, edition) for page, edition in self.pages)
        return [page for page, _ in self.pages] if is_there else []


class RequestMemory:
    """Slots of one request's segments. `epoch` changes when they move, after a preemption.

    `owner`: whose request it is; what prompts begin with is shared among those of one owner.
    `on_leaving` is called once, before the last of them are given back, unless what belongs there
    has been copied out and was never put back. `num_adopted` counts tokens
    whose keys and values were there before the request. `mean_pages` and `peak_pages` are of the
    passes that it has had slots for.
    """

    def __init__(self) -> None:
        self.slots: dict[int, SlotList] = {}
        self.owner = ""
        self.epoch = 0
        self.num_pages = 0
        self.peak_pages = 0
        self._page_passes = 0
        self._num_passes = 0
        self.num_adopted = 0
        self.on_leaving: Callable[[], None] | None = None
        self._copy: Copy | None = None

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

    def adopt(self, pool: Pool, pages: Sequence[int]) -> int:
        """The prompt, which has no slots yet, begins with pages that others have written; how many
        tokens these hold."""
        slots = self.slots[PROMPT] = pool.share(pages)
        self.num_pages += len(pages)
        self.peak_pages = max(self.peak_pages, self.num_pages)
        self.num_adopted += len(slots.slots)
        self.epoch += 1  # an engine has yet to learn of the segment's slots so far
        return len(slots.slots)

    def free(self, pool: Pool, handles: Iterable[int] | None = None) -> None:
        """Gives back the pages of some segments; None: of all, and any copy made of them."""
        if handles is None:
            leaving, self.on_leaving = self.on_leaving, None
            if leaving is not None and self._copy is None:
                leaving()
            handles = list(reversed(self.slots))  # of what is cached, the beginning goes last
            self._copy = None
        for handle in handles:
            slots = self.slots.get(handle)
            if slots is not None and slots.pages:
                self.num_pages -= len(slots.pages)
                pool.free(slots)

    # -- preemption ----------------------------------------------------------------------------

    def save(self, engine: Engine, pool: Pool) -> None:
        """Copies all KV out and gives all pages back."""
        lengths = {handle: len(s.slots) for handle, s in self.slots.items() if s.slots}
        pages = pool.common_beginning(self.slots.get(PROMPT, SlotList()))
        begin, rest = self._slots_of(lengths, len(pages) * pool.page_size)
        self._copy = Copy(
            lengths,
            tuple((page, pool.edition(page)) for page in pages),
            engine.copy_out(begin) if begin else None,
            engine.copy_out(rest) if rest else None,
        )
        for handle in reversed(lengths):
            pool.free(self.slots[handle])
        self.num_pages = 0

    def pages_to_restore(self, pool: Pool) -> int:
        """Free pages that putting back what `save` copied out takes."""
        if self._copy is None:
            return 0
        pages = self._copy.still_shared(pool)
        num_pages = sum(pool.pages_for(n) for n in self._copy.lengths.values())
        return num_pages - len(pages) + pool.num_cached(pages)

    def restore(self, engine: Engine, pool: Pool) -> None:
        """Puts what `save` copied out back, bit for bit, into whatever slots are free; but holds
        again what still lies where others had it too."""
        if self._copy is None:
            return
        copy = self._copy
        pages = copy.still_shared(pool)
        if pages:  # before any is taken: they may be cached
            self.slots[PROMPT] = pool.share(pages)
        for handle, length in copy.lengths.items():
            pool.extend(self.slots[handle], length - len(self.slots[handle].slots))
        begin, rest = self._slots_of(copy.lengths, len(copy.pages) * pool.page_size)
        if begin and not pages:
            engine.copy_in(begin, copy.begin)
        if rest:
            engine.copy_in(rest, copy.rest)
        self.num_pages = sum(len(self.slots[handle].pages) for handle in copy.lengths)
        self._copy = None
        self.epoch += 1

    def _slots_of(self, handles: Iterable[int], split: int) -> tuple[list[int], list[int]]:
        """The first `split` slots of the prompt, and all others of these segments."""
        begin: list[int] = []
        rest: list[int] = []
        for handle in handles:
            slots = self.slots[handle].slots
            cut = split if handle == PROMPT else 0
            begin += slots[:cut]
            rest += slots[cut:]
        return begin, rest
