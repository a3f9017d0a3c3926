"""The sides of `stretto eval run`: which models answer, how they are loaded and told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.models.shipped import DEFAULT_MODEL

if TYPE_CHECKING:
    from stretto.engines.base import Extra
    from stretto.eval.answers import Contestant
    from stretto.lm import LM

NO_BASELINE = "none"
AUTO = "auto"


@dataclass(frozen=True)
class Loader:
    """Where models run."""

    dtype: str
    device: str
    engine: str
    threads: int | None
    page_size: int
    pool_slots: int
    extras: tuple[Extra, ...] = ()

    def load(self, name: str) -> LM:
        from stretto.cli.answer import load

        return load(
            name,
            dtype=self.dtype,
            device=self.device,
            engine=self.engine,
            threads=self.threads,
            pool_slots=self.pool_slots,
            page_size=self.page_size,
            offline=False,
            extras=self.extras,
        )


@dataclass(frozen=True)
class Arm:
    """What is measured: a model, the method by which it answers, and where its run is kept."""

    model: str
    method: str
    out: Path
    without: tuple[str, ...] = ()
    joins: bool = True

    @property
    def name(self) -> str:
        return self.out.resolve().name


def chosen_arms(
    out: Path, texts: Sequence[str], *, model: str | None, method: str, without: Sequence[str],
    joins: bool,
) -> list[Arm]:  # fmt: skip
    """The arms of `--arm`, each kept in a folder of its name in `out`; without any the one of the
    other options, kept in `out` itself."""
    from stretto.errors import InvalidInput

    if not texts:
        one = DEFAULT_MODEL if model is None else model
        return [Arm(one, method, out, tuple(without), joins)]
    if model is not None or method != AUTO or without or not joins:
        raise InvalidInput(
            "--arm names models and methods itself; leave out --model, --method, --without and "
            "--no-joins"
        )
    arms = [_arm(out, text) for text in texts]
    for k, arm in enumerate(arms):
        if arm.name in {before.name for before in arms[:k]}:
            raise InvalidInput(f"two arms are called {arm.name}; give each --arm another name")
    return arms


def _arm(out: Path, text: str) -> Arm:
    """An arm of `NAME=MODEL[:METHOD]`."""
    from stretto.errors import InvalidInput

    name, _, rest = text.partition("=")
    model, colon, method = rest.rpartition(":")
    if not colon:
        model, method = rest, AUTO
    if not name or not model or name in (".", "..") or Path(name).name != name:
        raise InvalidInput(
            f"--arm is {text!r}; give NAME=MODEL or NAME=MODEL:METHOD, the name being a folder's"
        )
    return Arm(model, method, out / name)


def baseline_of(arms: Sequence[Arm], asked: str | None) -> str:
    """The baseline's model: of one arm its own, unless another is asked for."""
    from stretto.errors import InvalidInput

    if asked is not None:
        return asked
    if len({arm.model for arm in arms}) > 1:
        raise InvalidInput("arms of several models need one baseline; name it with --baseline")
    return arms[0].model


def load_sides(
    loader: Loader, arms: Sequence[Arm], baseline: str
) -> tuple[dict[str, Contestant], Contestant | None]:
    """All arms by name, and the baseline; one `LM` for all that are one model."""
    from stretto.errors import InvalidInput
    from stretto.eval.answers import Contestant
    from stretto.methods import extras

    needed = dict.fromkeys(extra for arm in arms for extra in extras(arm.method))
    load = cache(replace(loader, extras=tuple(needed)).load)
    contestants = {arm.name: _contestant(load(arm.model), arm) for arm in arms}
    other = None if baseline == NO_BASELINE else Contestant(load(baseline), "sequential")
    sides = [*contestants.values(), *([] if other is None else [other])]
    engines = list(dict.fromkeys(side.lm.engine.name for side in sides))
    if len(engines) > 1:
        raise InvalidInput(
            f"the sides would run on different engines ({' and '.join(engines)}); name one with "
            "--engine"
        )
    return contestants, other


def _contestant(lm: LM, arm: Arm) -> Contestant:
    from stretto.errors import Unsupported
    from stretto.eval.answers import Contestant
    from stretto.eval.restricted import blind, without

    name = lm.find_method(arm.method).name
    restricted = without(lm if arm.joins else blind(lm), arm.without)
    if restricted is not lm and name != lm.card.dialect:
        raise Unsupported(
            f"method {name!r} writes no dialect of the model, so --without and --no-joins change "
            "nothing of it; leave them out"
        )
    return Contestant(restricted, arm.method)


def told_side(side: Contestant | None, model: str) -> dict[str, Any] | None:
    """A side in a run's settings; None for none."""
    from stretto.eval.identity import describe_side

    return None if side is None else describe_side(side.lm, model, side.method)
