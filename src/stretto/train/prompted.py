"""Prompts that are ids already, for parsers of dialects, which encode what they are given."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.dialects.base import Vocabulary


class PromptIds(str):
    """A prompt that is ids already, in the place of a text (see `Prompted`)."""

    ids: list[int]

    def __new__(cls, ids: Sequence[int]) -> PromptIds:
        self = super().__new__(cls, "prompt")
        self.ids = list(ids)
        return self


class Prompted:
    """A vocabulary through which a dialect's parser takes a prompt that is ids already."""

    def __init__(self, inner: Vocabulary) -> None:
        self._inner = inner
        self.control = inner.control
        self.end_ids = inner.end_ids
        self.decode = inner.decode

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def spare_ids(self) -> frozenset[int]:
        return self._inner.spare_ids

    @property
    def reasoning_end(self) -> int | None:
        return self._inner.reasoning_end

    def encode(self, text: str) -> list[int]:
        return list(text.ids) if isinstance(text, PromptIds) else self._inner.encode(text)
