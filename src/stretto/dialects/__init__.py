"""Dialects: how tokens become moves. One file each; `get_dialect` finds one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from stretto.dialects import apar, apar_text, pasta_text, plain
from stretto.dialects.base import Parsed, Session, Vocabulary
from stretto.dialects.pasta import PastaSession, PastaSettings, Policy
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.tags import TAG_FORMS
from stretto.errors import UnknownName, Unsupported
from stretto.params import SamplingParams

__all__ = ["DIALECTS", "Card", "Dialect", "Settings", "get_dialect"]

DIALECTS = ("pasta", "apar", "plain")
LATER_NAMES = ("tip", "planned", "pasta+tip")
"""Dialects of later versions: refused by name."""


@dataclass(frozen=True)
class Dialect:
    """A dialect by name: its control tokens (name to text form), its parser and its sessions.

    `parse_text(text, vocabulary, settings, prompt)` reads an annotated text. With `ends_threads`
    a forked thread ends by drawing an end of sequence, which is in no trace: what its last token
    is trained to predict (`trace.labels`).
    """

    name: str
    control_forms: Mapping[str, str]
    parse_text: Callable[[str, Vocabulary, Settings, str], Parsed]
    sessions: Callable[[Vocabulary, Card, int], Callable[[SamplingParams], Session]]
    """(vocabulary, card, model positions) -> a maker of sessions that share their masks."""
    ends_threads: bool = False


class Card(Protocol):
    """The part of a model card (`stretto.tokens.ModelCard`) that decoding needs."""

    @property
    def policy(self) -> Policy: ...
    @property
    def unit(self) -> int: ...
    @property
    def fixed_length(self) -> int: ...


class Settings(Card, Protocol):
    """What a text is parsed under: a card's, and the model's positions (None: no limit). A dialect
    reads what it knows of."""

    @property
    def max_positions(self) -> int | None: ...


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


def _parse_pasta(text: str, vocabulary: Vocabulary, given: Settings, prompt: str) -> Parsed:
    settings = PastaSettings(given.policy, given.unit, given.fixed_length, given.max_positions)
    return pasta_text.parse_text(text, vocabulary, settings, prompt)


def _apar_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    masks, settings = apar.AparMasks(vocabulary), apar.AparSettings(max_positions=max_positions)
    return lambda params: apar.AparSession(masks, settings, max_forks=params.max_forks)


def _parse_apar(text: str, vocabulary: Vocabulary, given: Settings, prompt: str) -> Parsed:
    settings = apar.AparSettings(max_positions=given.max_positions)
    return apar_text.parse_text(text, vocabulary, settings, prompt)


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
        return Dialect(name, TAG_FORMS, _parse_pasta, _pasta_sessions)
    if name == "apar":
        return Dialect(name, apar.TAG_FORMS, _parse_apar, _apar_sessions, ends_threads=True)
    if name in LATER_NAMES:
        raise Unsupported(f"dialect {name!r} is not in this version; it has: {', '.join(DIALECTS)}")
    raise UnknownName("dialect", name, [*DIALECTS, *LATER_NAMES])
