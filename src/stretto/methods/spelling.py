"""Methods as text: a name, and the settings of those that keep to a budget.

`window,budget=256,pin_prompt` is `SlidingWindow(budget=256, pin_prompt=True)`. Wherever a method's
name is taken, such a text is taken too, and results record it, so that no setting is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from stretto.errors import InvalidInput

if TYPE_CHECKING:
    from stretto.methods.diffusion import Diffusion
    from stretto.methods.evicting import EvictingMethod

FLAGS = ("pin_prompt", "reindexed")
NUMBERS = ("page_tokens", "sinks")
BUDGET = "budget"
SETTINGS = (BUDGET, *FLAGS, *NUMBERS)
WINDOW = ("window", "block")
"""Those of method `diffusion`."""


def spell(name: str, settings: Mapping[str, Any]) -> str:
    """A method as text that `read` reads as the same. A setting that is None or False is left out,
    True is a flag."""
    parts = [name]
    for key, value in settings.items():
        if value is True:
            parts.append(key)
        elif value is not None and value is not False:
            parts.append(f"{key}={_plain(value) if isinstance(value, float) else value}")
    return ",".join(parts)


def _plain(share: float) -> str:
    """The shortest digits that are this number, without an exponent: 0.00001."""
    return f"{Decimal(repr(share)):f}"


def read(text: str) -> tuple[str, dict[str, Any]]:
    """A method's name and settings. Raises `InvalidInput` for a setting that there is not."""
    from stretto.methods import DIFFUSION
    from stretto.methods.budget import parse_budget

    name, *parts = text.split(",")
    if name == DIFFUSION:
        return name, _window(text, parts)
    found: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in SETTINGS or bool(equals) == (key in FLAGS):
            raise InvalidInput(
                f"method {text!r} has a part {part!r}; its settings are budget=N, "
                "page_tokens=N, sinks=N, pin_prompt and reindexed, after commas"
            )
        if key in found:
            raise InvalidInput(f"method {text!r} has {key!r} twice; leave one out")
        if key in NUMBERS and not re.fullmatch(r"[0-9]{1,18}", value):
            raise InvalidInput(f"method {text!r}: {key} is {value!r}, which is no number of tokens")
        if key == BUDGET:
            found[key] = parse_budget(value)
        else:
            found[key] = int(value) if key in NUMBERS else True
    return name, found


def _window(text: str, parts: list[str]) -> dict[str, Any]:
    """The settings of method `diffusion`."""
    found: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in WINDOW or key in found or not re.fullmatch(r"[0-9]{1,9}", value):
            raise InvalidInput(
                f"method {text!r} has a part {part!r}; its settings are window=N and block=N, each "
                "once, after commas"
            )
        found[key] = int(value)
    return found


def diffusion(settings: Mapping[str, Any]) -> Diffusion:
    """The method with these settings. Raises `InvalidInput` without a window, and for a bad one."""
    from stretto.methods.diffusion import Diffusion

    if "window" not in settings:
        raise InvalidInput(
            "method 'diffusion' needs a window, the tokens of an answer at most: "
            "'diffusion,window=192'"
        )
    return Diffusion(**settings)


def evicting(name: str, settings: Mapping[str, Any]) -> EvictingMethod:
    """The method of this name, which is one of `EVICTING`. Raises `InvalidInput` for a setting
    that it does not have, a bad one, or a budget that is missing."""
    from stretto.methods.paged_h2o import PagedH2O
    from stretto.methods.random_evict import RandomEvict
    from stretto.methods.streaming_llm import StreamingLLM
    from stretto.methods.window import SlidingWindow

    known: tuple[type[EvictingMethod], ...] = (StreamingLLM, PagedH2O, RandomEvict, SlidingWindow)
    kind = next(kind for kind in known if kind.rule == name)
    for key in settings.keys() - {field.name for field in fields(kind)}:
        refuse(name, key)
    if BUDGET not in settings:
        raise InvalidInput(
            f"method {name!r} needs a budget of visible tokens; give --budget 256, or in Python "
            f"'{name},budget=256'"
        )
    return kind(**settings)


def refuse(name: str, key: str) -> None:
    from stretto.methods import EVICTING

    owners = ["streaming_llm"] if key in ("sinks", "reindexed") else list(EVICTING)
    raise InvalidInput(f"method {name!r} has no setting {key!r}; {', '.join(owners)} may have it")
