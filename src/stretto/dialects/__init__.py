"""Dialects: how tokens become moves. One file each; `get_dialect` finds one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from stretto.dialects import pasta_text, plain
from stretto.dialects.base import Parsed, Session, Vocabulary
from stretto.dialects.pasta import PastaSession, PastaSettings, Policy
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.tags import TAG_FORMS
from stretto.errors import UnknownName, Unsupported
from stretto.params import SamplingParams

__all__ = ["DIALECTS", "Dialect", "get_dialect"]

DIALECTS = ("pasta", "plain")
LATER_NAMES = ("tip", "planned", "pasta+tip")
"""Dialects of later versions: refused by name."""


@dataclass(frozen=True)
class Dialect:
    """A dialect by name: its control tokens (name to text form), its parser and its sessions.

    `parse_text(text, vocabulary, settings, prompt)` reads an annotated text.
    """

    name: str
    control_forms: Mapping[str, str]
    parse_text: Callable[[str, Vocabulary, PastaSettings, str], Parsed]
    sessions: Callable[[Vocabulary, Card, int], Callable[[SamplingParams], Session]]
    """(vocabulary, card, model positions) -> a maker of sessions that share their masks."""


class Card(Protocol):
    """The part of a model card (`stretto.tokens.ModelCard`) that decoding needs."""

    @property
    def policy(self) -> Policy: ...
    @property
    def unit(self) -> int: ...
    @property
    def fixed_length(self) -> int: ...


def _plain_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    return lambda params: plain.PlainSession()


def _pasta_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    settings = PastaSettings(card.policy, card.unit, card.fixed_length, max_positions)
    masks = PastaMasks(vocabulary, card.unit)
    return lambda params: PastaSession(masks, settings, max_forks=params.max_forks)


def get_dialect(name: str) -> Dialect:
    """The dialect called `name`. Raises `Unsupported` for one of a later version, `UnknownName`
    for any other."""
    if name == "plain":
        return Dialect(
            name,
            {},
            lambda text, vocabulary, _, prompt: plain.parse_text(text, vocabulary, prompt),
            _plain_sessions,
        )
    if name == "pasta":
        return Dialect(name, TAG_FORMS, pasta_text.parse_text, _pasta_sessions)
    if name in LATER_NAMES:
        raise Unsupported(f"dialect {name!r} is not in this version; it has: {', '.join(DIALECTS)}")
    raise UnknownName("dialect", name, [*DIALECTS, *LATER_NAMES])
