"""What a request may ask of a model and its method: the model's own variant and convention, and
settings that the method reads."""

from __future__ import annotations

from stretto.dialects import DIALECTS, get_dialect
from stretto.errors import UnknownName, Unsupported
from stretto.methods import Method
from stretto.params import METHOD_FIELDS, SamplingParams
from stretto.tokens.card import ModelCard


def check_asked(card: ModelCard, method: Method, params: SamplingParams) -> None:
    """Raises `InvalidInput`, by name, for what a model of this card cannot be run with by this
    method: another variant or convention than it was trained in, or a setting that nobody would
    read."""
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
    for name in params.set_of(unread(method)):
        raise Unsupported(
            f"{name} {getattr(params, name)!r} is not read by method {method.name!r}, but by "
            f"{', '.join(_readers(name))}; leave it out"
        )


def unread(method: Method) -> tuple[str, ...]:
    """Those of `METHOD_FIELDS` that a method does not read."""
    reads = getattr(method, "reads", ())
    return tuple(name for name in METHOD_FIELDS if name not in reads)


def _readers(name: str) -> list[str]:
    """Methods that read a field."""
    from stretto.methods.diffusion import Diffusion
    from stretto.methods.sot import SkeletonOfThought

    known = {dialect: get_dialect(dialect).reads for dialect in DIALECTS}
    known |= {"sot": SkeletonOfThought.reads, "diffusion": Diffusion.reads}
    return [method for method, reads in known.items() if name in reads]
