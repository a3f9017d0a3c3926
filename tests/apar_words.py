"""A closed vocabulary with dialect apar's control tokens, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.dialects.apar import TAG_FORMS

FORK, CHILD, EOS = range(3)
TEXTS = [*TAG_FORMS.values(), "</s>", " a", " b", "x\n", " 😀", "", "?"]
A, B, LINE, EMPTY, SPARE = 3, 4, 5, 7, 8
TEXT_IDS = set(range(A, EMPTY))


class AparVocabulary:
    """Ids 0..8; encoding takes the longest piece that fits, of text alone."""

    control = {name: i for i, name in enumerate(TAG_FORMS)}  # noqa: RUF012
    end_ids = frozenset({EOS})
    spare_ids = frozenset({SPARE})
    reasoning_end = None
    size = len(TEXTS)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            fits = [i for i in TEXT_IDS if text.startswith(TEXTS[i])]
            ids.append(max(fits, key=lambda i: len(TEXTS[i])))
            text = text[len(TEXTS[ids[-1]]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(TEXTS[i] for i in ids)


VOCABULARY = AparVocabulary()
