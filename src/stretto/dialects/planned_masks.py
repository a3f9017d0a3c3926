"""Which ids are legal in each state of dialect `planned`, computed once per vocabulary."""

from __future__ import annotations

from stretto.dialects.base import Legal, Vocabulary
from stretto.dialects.masks import mask_of
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.tags import PROMISE, SYNC, PromiseReader

PAD, MASK = "pad", "mask"


class PlannedMasks:
    """Masks over a vocabulary's ids, one per state; all sessions of a model share one object.

    A plan is promises alone, at least one, and then `<sync/>` or the end. A span may hold any text
    and `[PAD]`: no mask, no other control token, no end, no spare id.
    """

    def __init__(self, vocabulary: Vocabulary, unit: int) -> None:
        self.vocabulary = vocabulary
        control = vocabulary.control
        self._promise = PastaMasks(vocabulary, unit)
        text = self._promise.child.mask & ~mask_of(vocabulary, control.values())
        first = [control[PROMISE]]
        self.first_promise = Legal(mask_of(vocabulary, first))
        ends = [*vocabulary.end_ids, control[SYNC]]
        self.next_promise = Legal(mask_of(vocabulary, [*first, *ends]))
        self.span = Legal(text | mask_of(vocabulary, [control[PAD]]))

    def in_promise(self, reader: PromiseReader) -> Legal:
        """What may follow the part of a promise that the reader has read."""
        return self._promise.in_promise(reader)
