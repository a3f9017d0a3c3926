"""Methods: ways to answer a prompt with a model. One file each; `get_method` finds one by name.

A method turns a chat into prompt ids and a session; the runtime does the rest. One that hides what
a model may see brings a policy as well, and settings, which stand after its name (`spelling`).
A method may name in `reads` those of `params.METHOD_FIELDS` that it reads; without it, it reads
none of them, and a request that sets one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from stretto.errors import UnknownName, Unsupported

if TYPE_CHECKING:
    from stretto.dialects.base import Session
    from stretto.engines.base import Extra
    from stretto.lm import LM
    from stretto.methods.diffusion import Window
    from stretto.params import SamplingParams
    from stretto.runtime.policy import Policy

AUTO = "auto"
"""The model's own way: the windows it was trained in, or its dialect, or else sequential
decoding."""

EVICTING = ("streaming_llm", "paged_h2o", "random_evict", "window")
"""Methods that keep to a budget of visible tokens."""

DIFFUSION = "diffusion"
"""Of models that were trained so: no plan, and all of a window is one block, or several."""

METHODS = ("sequential", "sot", "dense", *EVICTING)
"""Methods for any model; a model's dialect is a method of that model too."""


@runtime_checkable
class Method(Protocol):
    @property
    def name(self) -> str: ...

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], Session]:
        """Prompt ids and a fresh session. A string is text as it is, without a chat template."""
        ...


@runtime_checkable
class HidingMethod(Method, Protocol):
    """A method that brings a policy; a `Method` without `policy` hides nothing of its own."""

    def policy(
        self, num_prompt_tokens: int, params: SamplingParams, *, pool_page: int, sample: int
    ) -> Policy:
        """A fresh policy for one request. Raises `InvalidInput` for a budget that it cannot keep
        to. `pool_page`: the pool's slots a page; `sample`: the number of the prompt's sample."""
        ...


def check_method(method: str | Method, dialect: str | None = None) -> None:
    """Raises `UnknownName` unless a model of `dialect` (None: any) can be run by a method, and
    `InvalidInput` for settings that it does not have."""
    from stretto.dialects import DIALECTS, get_dialect
    from stretto.methods.spelling import diffusion, evicting, read, refuse

    if not isinstance(method, str):
        if not isinstance(method, Method):
            raise UnknownName("method", method, [AUTO, *METHODS])
        return
    name, settings = read(method)
    dialects = DIALECTS if dialect is None else (dialect,)
    known = [AUTO, *METHODS, *(d for d in dialects if d != "plain")]
    known += [DIFFUSION] if any(get_dialect(d).variants for d in dialects) else []
    if name not in known:
        raise UnknownName("method", name, known)
    if name in EVICTING:
        evicting(name, settings)
    if name == DIFFUSION:
        diffusion(settings)
    for key in () if name in (DIFFUSION, *EVICTING) else settings:
        refuse(name, key)


def get_method(method: str | Method, dialect: str, window: Window | None = None) -> Method:
    """The method of a name, or of a text with settings, for a model of `dialect`; one that is
    given as an object is that. `window`: the model was trained to answer in it, and in no other
    way. Raises `UnknownName` and `InvalidInput`."""
    from stretto.dialects import get_dialect
    from stretto.methods.diffusion import Diffusion, check_window

    if window is not None and method == AUTO:
        return Diffusion.of(window)
    found = _method(method, dialect)
    if window is not None:
        check_window(found, window)
    if get_dialect(dialect).is_foreign and found.name != dialect:
        raise Unsupported(
            f"method {found.name!r} is asked for, but the model is one of dialect {dialect} and "
            "means nothing otherwise; leave it out"
        )
    return found


def _method(method: str | Method, dialect: str) -> Method:
    from stretto.methods.dense import Dense
    from stretto.methods.native import Native
    from stretto.methods.sequential import Sequential
    from stretto.methods.sot import SkeletonOfThought
    from stretto.methods.spelling import diffusion, evicting, read

    if not isinstance(method, str):
        if not isinstance(method, Method):
            raise UnknownName("method", method, [AUTO, *METHODS])
        return method
    check_method(method, dialect)
    name, settings = read(method)
    if name in EVICTING:
        return evicting(name, settings)
    if name == DIFFUSION:
        return diffusion(settings)
    if name == AUTO:
        name = "sequential" if dialect == "plain" else dialect
    if name == "sequential":
        return Sequential()
    if name == "dense":
        return Dense()
    return SkeletonOfThought() if name == "sot" else Native(name)


def extras(method: str | Method) -> tuple[Extra, ...]:
    """What an engine must be able to do, besides logits, for a method."""
    if isinstance(method, str):
        from stretto.methods.spelling import evicting, read

        name, settings = read(method)
        if name not in EVICTING:
            return ()
        method = evicting(name, settings)
    found: list[Extra] = []
    if getattr(method, "wants_attention", False):
        found.append("attention mass")
    if getattr(method, "is_reindexed", False):
        found.append("re-indexed positions")
    return tuple(found)


def is_for_any_model(name: str) -> bool:
    """Whether a completion's `method` is none of a model's dialect, so that it writes no
    annotations."""
    return name.partition(",")[0] in (DIFFUSION, *METHODS)
