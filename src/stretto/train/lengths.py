"""The ablation of promised lengths: what a promise says of its chunk, and where main goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.dialects.base import Vocabulary
from stretto.dialects.outline import Promised, outline
from stretto.dialects.registers import is_register, register_tags
from stretto.dialects.tags import MAX_PROMISED_TOKENS, Tag, round_up, text_tags

LENGTHS: Mapping[str, Mapping[str, Any]] = {
    "exact": {"unit": 1, "policy": "predicted"},
    "tens": {"unit": 10, "policy": "predicted"},
    "fixed": {"unit": 10, "policy": "fixed"},
    "overlap": {"unit": 10, "policy": "overlap"},
}
"""Each variant's settings of the model card. exact: the chunk's own number of tokens. tens: that
rounded up to tens. fixed, overlap: as tens, and main goes on at a fixed distance, or at once."""


def relabel(text: str, vocabulary: Vocabulary, unit: int) -> str:
    """An annotated text whose promises say how long their blocks are under this vocabulary.

    That is the number of the block's tokens, at least 1, rounded up to `unit`. Promises without a
    block, and all else, stay as they are.
    """
    parts, _ = outline(text_tags(text, unit), len(text))
    pieces, at = [], 0
    for part in parts:
        if not isinstance(part, Promised) or part.block is None:
            continue
        num_tokens = _num_tokens(text[part.block.start : part.block.end], vocabulary)
        pieces += [text[at : part.tag.start], _promise(part.tag, num_tokens, unit)]
        at = part.tag.end
    return "".join([*pieces, text[at:]])


def _num_tokens(text: str, vocabulary: Vocabulary) -> int:
    """Tokens of a block's text, where a register, if the vocabulary has any, is one."""
    tags, _ = register_tags(text, sum(map(is_register, vocabulary.control)))
    starts, ends = [0, *(tag.end for tag in tags)], [*(tag.start for tag in tags), len(text)]
    runs = (vocabulary.encode(text[a:b]) for a, b in zip(starts, ends, strict=True))
    return len(tags) + sum(map(len, runs))


def _promise(tag: Tag, num_tokens: int, unit: int) -> str:
    return with_length(tag, min(MAX_PROMISED_TOKENS, round_up(max(1, num_tokens), unit)))


def with_length(tag: Tag, length: int) -> str:
    """A promise as text, with this number in it."""
    quote = "'" if '"' in tag.topic else '"'
    return f'<promise topic={quote}{tag.topic}{quote} tokens="{length}"/>'
