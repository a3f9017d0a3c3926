"""What a request may ask of a model: its own variant and convention, and blocks if it has any."""

from __future__ import annotations

from dataclasses import fields

from stretto.dialects import get_dialect
from stretto.errors import UnknownName, Unsupported
from stretto.params import BLOCK_FIELDS, SamplingParams
from stretto.tokens.card import ModelCard


def check_asked(card: ModelCard, params: SamplingParams) -> None:
    """Raises `InvalidInput`, by name, for what a model of this card cannot be run with: another
    variant or convention than it was trained in, or settings of blocks if it writes none."""
    dialect = get_dialect(card.dialect)
    for name, known in (("variant", dialect.variants), ("convention", dialect.conventions)):
        asked, own = getattr(params, name), getattr(card, name)
        if asked is None:
            continue
        if not known:
            raise Unsupported(f"{name} {asked!r}: dialect {card.dialect} has none; leave it out")
        if asked not in known:
            raise UnknownName(name, asked, list(known))
        if asked != own:
            raise Unsupported(
                f"{name} {asked!r} is asked for, but the model was trained as {own!r} and means "
                "nothing otherwise; leave it out, or load a model of the other kind"
            )
    if dialect.variants:
        return
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name in BLOCK_FIELDS and value != field.default:
            raise Unsupported(
                f"{field.name} {value!r} is of models that write blocks, and dialect "
                f"{card.dialect} has none; leave it out"
            )
