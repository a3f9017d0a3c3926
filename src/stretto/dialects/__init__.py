"""Dialects: how tokens become moves. One file each; `get_dialect` finds one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, get_args

from stretto.dialects import (
    apar,
    apar_text,
    masked,
    pasta_text,
    pasta_tip_text,
    plain,
    planned,
    planned_text,
    tip_text,
)
from stretto.dialects.base import BlockRules, Parsed, Session, Vocabulary
from stretto.dialects.pasta import PastaSession, PastaSettings, Policy
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.pasta_tip import PastaTipMasks, PastaTipSession
from stretto.dialects.planned import Convention, PlannedSettings, Variant
from stretto.dialects.planned_masks import MASK, PAD, PlannedMasks
from stretto.dialects.registers import DEFAULT_REGISTERS, register_forms
from stretto.dialects.tags import SYNC, TAG_FORMS
from stretto.dialects.tip import TipMasks, TipSession, TipSettings
from stretto.effects import Denoise
from stretto.errors import UnknownName, Unsupported
from stretto.params import METHOD_FIELDS, PASS_FIELDS, THREAD_FIELDS, SamplingParams

__all__ = ["DIALECTS", "Card", "Dialect", "DialectSettings", "Settings", "get_dialect"]

DIALECTS = ("pasta", "tip", "pasta+tip", "planned", "apar", "masked", "plain")


@dataclass(frozen=True)
class Dialect:
    """A dialect by name: its control tokens (name to text form), its parser and its sessions.

    `control_forms` are those of the default settings; where they depend on settings, `forms_of`
    gives them. `parse_text(text, vocabulary, settings, prompt)` reads an annotated text. With
    `ends_threads` a forked thread ends by drawing an end of sequence, which is in no trace: what
    its last token is trained to predict (`trace.labels`).
    """

    name: str
    control_forms: Mapping[str, str]
    parse_text: Callable[[str, Vocabulary, Settings, str], Parsed]
    sessions: Callable[[Vocabulary, Card, int], Callable[[SamplingParams], Session]]
    """(vocabulary, card, model positions) -> a maker of sessions that share their masks."""
    ends_threads: bool = False
    variants: tuple[str, ...] = ()
    """What a card's `variant` may be, of which it names one; its `convention` likewise."""
    conventions: tuple[str, ...] = ()
    blocks: Callable[[Vocabulary, Card], BlockRules] | None = None
    """How its models write blocks, for training; None: they write none, or are not trained."""
    reads: tuple[str, ...] = ()
    """Those of `params.METHOD_FIELDS` that its sessions, or the runtime for them, read."""
    forms_of: Callable[[Card], Mapping[str, str]] | None = None
    is_foreign: bool = False
    """Of models that others have trained: they are run in this way alone, and not trained here."""

    def forms(self, card: Card) -> Mapping[str, str]:
        """The control tokens of a model of this card, name to text form."""
        return self.control_forms if self.forms_of is None else self.forms_of(card)


class Card(Protocol):
    """The part of a model card (`stretto.tokens.ModelCard`) that decoding needs."""

    @property
    def policy(self) -> Policy: ...
    @property
    def unit(self) -> int: ...
    @property
    def fixed_length(self) -> int: ...
    @property
    def num_registers(self) -> int: ...
    @property
    def grace(self) -> bool: ...
    @property
    def variant(self) -> Variant | None: ...
    @property
    def convention(self) -> Convention | None: ...


class Settings(Card, Protocol):
    """What a text is parsed under: a card's, and the model's positions (None: no limit). A dialect
    reads what it knows of."""

    @property
    def max_positions(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class DialectSettings:
    """The settings of every dialect at their defaults: `Settings` without a model."""

    policy: Policy = "predicted"
    unit: int = 10
    fixed_length: int = 50
    num_registers: int = DEFAULT_REGISTERS
    grace: bool = False
    variant: Variant | None = None
    convention: Convention | None = None
    max_positions: int | None = None

    @classmethod
    def of_card(cls, card: Card, max_positions: int | None) -> Self:
        """A model's settings."""
        names = [field.name for field in fields(cls) if field.name != "max_positions"]
        return cls(**{name: getattr(card, name) for name in names}, max_positions=max_positions)

    @classmethod
    def given(cls, settings: Mapping[str, Any]) -> Self:
        """The defaults with these of a card's fields over them; others of its fields are left
        out. Values are the card's to check."""
        known = {field.name for field in fields(cls)}
        return replace(cls(), **{k: v for k, v in settings.items() if k in known})


def _plain_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    return lambda params: plain.PlainSession()


def _pasta_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    settings = _pasta_settings(card, max_positions)
    masks = PastaMasks(vocabulary, card.unit)
    return lambda params: PastaSession(masks, settings, max_forks=params.max_forks)


def _parse_pasta(text: str, vocabulary: Vocabulary, given: Settings, prompt: str) -> Parsed:
    settings = _pasta_settings(given, given.max_positions)
    return pasta_text.parse_text(text, vocabulary, settings, prompt)


def _pasta_settings(card: Card, max_positions: int | None) -> PastaSettings:
    return PastaSettings(card.policy, card.unit, card.fixed_length, max_positions)


def _tip_settings(card: Card, max_positions: int | None) -> TipSettings:
    return TipSettings(card.num_registers, card.grace, max_positions)


def _tip_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    masks, settings = TipMasks(vocabulary, card.num_registers), _tip_settings(card, max_positions)
    return lambda params: TipSession(masks, settings)


def _parse_tip(text: str, vocabulary: Vocabulary, given: Settings, prompt: str) -> Parsed:
    settings = _tip_settings(given, given.max_positions)
    return tip_text.parse_text(text, vocabulary, settings, prompt)


def _pasta_tip_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    pasta, tip = _pasta_settings(card, max_positions), _tip_settings(card, max_positions)
    masks = PastaTipMasks(PastaMasks(vocabulary, card.unit), card.num_registers)
    return lambda params: PastaTipSession(masks, pasta, tip, max_forks=params.max_forks)


def _parse_pasta_tip(text: str, vocabulary: Vocabulary, given: Settings, prompt: str) -> Parsed:
    limit = given.max_positions
    pasta, tip = _pasta_settings(given, limit), _tip_settings(given, limit)
    return pasta_tip_text.parse_text(text, vocabulary, pasta, tip, prompt)


def _tip_forms(card: Card) -> dict[str, str]:
    return register_forms(card.num_registers)


def _pasta_tip_forms(card: Card) -> dict[str, str]:
    return {**TAG_FORMS, **register_forms(card.num_registers)}


def _apar_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    masks, settings = apar.AparMasks(vocabulary), apar.AparSettings(max_positions=max_positions)
    return lambda params: apar.AparSession(masks, settings, max_forks=params.max_forks)


def _parse_apar(text: str, vocabulary: Vocabulary, given: Settings, prompt: str) -> Parsed:
    settings = apar.AparSettings(max_positions=given.max_positions)
    return apar_text.parse_text(text, vocabulary, settings, prompt)


def _planned_settings(card: Card, max_positions: int | None) -> PlannedSettings:
    variant = "sparse" if card.variant is None else card.variant
    convention = "shifted" if card.convention is None else card.convention
    return PlannedSettings(variant, convention, card.unit, max_positions)


def _planned_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    settings = _planned_settings(card, max_positions)
    masks = PlannedMasks(vocabulary, card.unit)

    def session(params: SamplingParams) -> Session:
        caps = planned.PlanCaps(
            params.max_forks, params.max_rounds, params.max_thread_tokens, params.length_scale
        )
        return planned.PlannedSession(masks, settings, caps)

    return session


def _planned_blocks(vocabulary: Vocabulary, card: Card) -> BlockRules:
    settings, control = _planned_settings(card, None), vocabulary.control

    def block(number: int, length: int, position: int) -> Denoise:
        return settings.span(control, number, length, position, "")

    return BlockRules(
        mask=control[MASK],
        filler=control[PAD],
        legal=PlannedMasks(vocabulary, card.unit).span,
        main_role=planned.PlannedSession.main_role,
        between=control[SYNC],
        block=block,
    )


def _parse_planned(text: str, vocabulary: Vocabulary, given: Settings, prompt: str) -> Parsed:
    settings = _planned_settings(given, given.max_positions)
    return planned_text.parse_text(text, vocabulary, settings, prompt)


def _masked_sessions(
    vocabulary: Vocabulary, card: Card, max_positions: int
) -> Callable[[SamplingParams], Session]:
    rules = masked.MaskedRules(vocabulary, shifted=card.convention == "shifted")
    return lambda params: masked.MaskedSession(rules)


def _parse_masked(text: str, vocabulary: Vocabulary, given: Settings, prompt: str) -> Parsed:
    raise Unsupported("dialect masked writes no annotations; read the text as dialect plain")


def _planned() -> Dialect:
    return Dialect(
        "planned",
        planned.PLANNED_FORMS,
        _parse_planned,
        _planned_sessions,
        variants=get_args(Variant),
        conventions=get_args(Convention),
        blocks=_planned_blocks,
        reads=METHOD_FIELDS,
    )


def _masked() -> Dialect:
    return Dialect(
        "masked",
        masked.MASKED_FORMS,
        _parse_masked,
        _masked_sessions,
        conventions=get_args(Convention),
        reads=PASS_FIELDS,
        is_foreign=True,
    )


def get_dialect(name: str) -> Dialect:
    """The dialect called `name`. Raises `UnknownName` for any other."""
    if name == "plain":
        return Dialect(
            name,
            {},
            lambda text, vocabulary, _, prompt: plain.parse_text(text, vocabulary, prompt),
            _plain_sessions,
        )
    if name == "pasta":
        return Dialect(name, TAG_FORMS, _parse_pasta, _pasta_sessions, reads=THREAD_FIELDS)
    if name == "apar":
        return Dialect(
            name, apar.TAG_FORMS, _parse_apar, _apar_sessions, ends_threads=True,
            reads=THREAD_FIELDS,
        )  # fmt: skip
    if name == "tip":
        forms = _tip_forms(DialectSettings())
        return Dialect(name, forms, _parse_tip, _tip_sessions, forms_of=_tip_forms)
    if name == "pasta+tip":
        forms = _pasta_tip_forms(DialectSettings())
        return Dialect(
            name, forms, _parse_pasta_tip, _pasta_tip_sessions, forms_of=_pasta_tip_forms,
            reads=THREAD_FIELDS,
        )  # fmt: skip
    if name in ("planned", "masked"):
        return _planned() if name == "planned" else _masked()
    raise UnknownName("dialect", name, list(DIALECTS))
