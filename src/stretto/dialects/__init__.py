"""Dialects: how tokens become moves. One file each; `get_dialect` finds one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.dialects import pasta_text, plain
from stretto.dialects.base import Parsed, Vocabulary
from stretto.dialects.pasta import PastaSettings
from stretto.dialects.tags import TAG_FORMS
from stretto.errors import UnknownName, Unsupported
from stretto.trace import Trace

__all__ = ["Dialect", "get_dialect"]

_NAMES = ("pasta", "plain")
LATER_NAMES = ("tip", "planned", "pasta+tip")
"""Dialects of later versions: refused by name."""

Offsets = dict[tuple[int, int], int]
"""Offset in a text of each token: (segment id, token index) to code points."""


@dataclass(frozen=True)
class Dialect:
    """A dialect by name: its control tokens (name to text form), its parser, and the way back.

    `parse_text(text, vocabulary, settings, prompt)` reads an annotated text, and
    `to_text(trace, vocabulary, settings)` writes one, with the offsets of its tokens.
    """

    name: str
    control_forms: Mapping[str, str]
    parse_text: Callable[[str, Vocabulary, PastaSettings, str], Parsed]
    to_text: Callable[[Trace, Vocabulary, PastaSettings], tuple[str, Offsets]]


def get_dialect(name: str) -> Dialect:
    """The dialect called `name`. Raises `Unsupported` for one of a later version, `UnknownName`
    for any other."""
    if name == "plain":
        return Dialect(
            name,
            {},
            lambda text, vocabulary, _, prompt: plain.parse_text(text, vocabulary, prompt),
            lambda trace, vocabulary, _: pasta_text.to_text(trace, vocabulary, PastaSettings()),
        )
    if name == "pasta":
        return Dialect(name, TAG_FORMS, pasta_text.parse_text, pasta_text.to_text)
    if name in LATER_NAMES:
        raise Unsupported(f"dialect {name!r} is not in this version; it has: {', '.join(_NAMES)}")
    raise UnknownName("dialect", name, [*_NAMES, *LATER_NAMES])
