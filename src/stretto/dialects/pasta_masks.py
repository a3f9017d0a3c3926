"""Which ids are legal in each state of dialect `pasta`, computed once per vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.dialects.base import Legal, Vocabulary
from stretto.dialects.masks import Mask, mask_of
from stretto.dialects.tags import (
    ASYNC_END,
    PROMISE,
    PROMISE_END,
    SYNC,
    TOKENS,
    PromiseReader,
    max_units,
    read_number,
)

MAX_TOPIC_TOKENS = 16


class PastaMasks:
    """Masks over a vocabulary's ids, one per state; all sessions of a model share one object.

    Ids without text are legal nowhere unless they end a sequence; nor are spare ids, `<async>`
    and the control tokens of other dialects. The vocabulary's size must not change any more.
    """

    def __init__(self, vocabulary: Vocabulary, unit: int) -> None:
        self.vocabulary = vocabulary
        self._control = vocabulary.control
        self._max_units = max_units(unit)
        texts = [vocabulary.decode([i]) for i in range(vocabulary.size)]
        ends = vocabulary.end_ids
        apart = ends | vocabulary.spare_ids | set(vocabulary.control.values())
        text = self._only(i for i, t in enumerate(texts) if t and i not in apart)
        # Between quotes a topic is one line; which quotes is up to whoever writes it as text.
        broken = self._only(i for i, t in enumerate(texts) if any(c in t for c in '"\r\n'))
        self._numbers = [
            (i, t) for i, t in enumerate(texts) if text[i] and t.isascii() and t.isdigit()
        ]
        main = text | self._only(ends)
        self.main = Legal(main | self._only([self._control[PROMISE], self._control[SYNC]]))
        self.main_full = Legal(main | self._only([self._control[SYNC]]))
        self.child = Legal(text | self._only([self._control[ASYNC_END]]))
        self.forced_end = Legal(self._only([self._control[ASYNC_END]]), forced=True)
        self._topic_end = Legal(self._only([self._control[TOKENS]]))
        self._topic = Legal((text & ~broken) | self._topic_end.mask)
        self._by_number: dict[str, Legal] = {}

    def in_promise(self, reader: PromiseReader) -> Legal:
        """What may follow the part of a promise that the reader has read."""
        if not reader.in_number:
            return self._topic if len(reader.topic) < MAX_TOPIC_TOKENS else self._topic_end
        known = self._by_number.get(reader.digits)
        if known is None:
            known = self._by_number[reader.digits] = self._after_digits(reader.digits)
        return known

    def _after_digits(self, digits: str) -> Legal:
        legal = [i for i, t in self._numbers if self._is_number(digits + t)]
        if digits:
            legal.append(self._control[PROMISE_END])
        return Legal(self._only(legal))

    def _is_number(self, digits: str) -> bool:
        return not digits.startswith("0") and read_number(digits, self._max_units) is not None

    def _only(self, ids: Iterable[int]) -> Mask:
        return mask_of(self.vocabulary, ids)
