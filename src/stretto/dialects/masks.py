"""Masks over a vocabulary's ids, for the automata of dialects."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stretto.dialects.base import Vocabulary

Mask = NDArray[np.bool_]


def text_ids(vocabulary: Vocabulary) -> list[int]:
    """Ids that have a text and are neither an end, nor spare, nor a control token."""
    apart = vocabulary.end_ids | vocabulary.spare_ids | set(vocabulary.control.values())
    return [i for i in range(vocabulary.size) if i not in apart and vocabulary.decode([i])]


def mask_of(vocabulary: Vocabulary, ids: Iterable[int]) -> Mask:
    """The mask of these ids alone. The vocabulary must not grow any more."""
    mask = np.zeros(vocabulary.size, dtype=np.bool_)
    mask[list(ids)] = True
    return mask
