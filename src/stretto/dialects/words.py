"""Tokenizer `words`: splits text by a regex and needs no model. The default of `trace show`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PIECE = re.compile(r"\s*\S+|\s+")


class WordsVocabulary:
    """Pieces of text matched by `\\s*\\S+|\\s+`, given ids as they are met.

    Control ids come first, in the order of `control_forms` (name to text form). A piece of text
    that reads like a control token is a piece of its own: text can never forge one. Every string
    round-trips: `decode(encode(text)) == text`.
    """

    def __init__(self, control_forms: Mapping[str, str]) -> None:
        self.control: Mapping[str, int] = {name: i for i, name in enumerate(control_forms)}
        self.end_ids: frozenset[int] = frozenset()
        self.spare_ids: frozenset[int] = frozenset()
        self.reasoning_end: int | None = None
        self._texts = list(control_forms.values())
        self._ids: dict[str, int] = {}

    @property
    def size(self) -> int:
        """Ids so far; grows as new pieces are met."""
        return len(self._texts)

    def encode(self, text: str) -> list[int]:
        return [self._intern(piece) for piece in _PIECE.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[i] for i in ids)

    def _intern(self, piece: str) -> int:
        known = self._ids.get(piece)
        if known is None:
            known = self._ids[piece] = len(self._texts)
            self._texts.append(piece)
        return known
