"""Sampling parameters as users give them. Imports no torch: bad values fail before a load."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from stretto.errors import InvalidInput, UnknownName

SURROGATE = re.compile("[\ud800-\udfff]")
"""Stands for bytes that are no UTF-8; no model writes one."""


MAX_SEED = (1 << 63) - 1
"""The largest one that every generator of random numbers takes."""

ORDERS = ("entropy", "confidence", "margin", "random")
"""What a block's pass writes first: where the distribution has the lowest entropy, where what was
drawn is likeliest, where the likeliest is furthest ahead of the next one, or anything."""

THREAD_FIELDS = ("max_thread_tokens", "max_forks")
"""Settings of methods that fork threads."""

PASS_FIELDS = ("steps_ratio", "threshold", "order", "early_finish")
"""Settings of methods that write blocks: what each pass writes."""

BLOCK_FIELDS = ("max_rounds", "length_scale", *PASS_FIELDS)
"""Settings of methods that write blocks, some of them of those that plan them alone."""

METHOD_FIELDS = (*THREAD_FIELDS, *BLOCK_FIELDS)
"""Settings that some methods read and others do not."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request is decoded.

    `max_tokens` bounds all tokens that all threads of the request draw, control tokens included.
    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep everything. `repetition_penalty` is
    over the text of the response that is visible to the thread, annotations left out. `stop`
    strings end the request and are cut off; `stop_ids` end the thread that drew them, and are never
    written in a block. `max_thread_tokens` caps each forked thread on top of its dialect's cap,
    `max_forks` their number, `max_rounds` the rounds of planning. Fields that the method of a
    request does not read (`METHOD_FIELDS`) are to be left at their defaults.

    Of blocks, which are written in any order over several passes: `steps_ratio` is the share of
    their length that they take as passes; with a `threshold` a pass instead writes all that is at
    least so likely, and one token at least. `order` says what is written first, `length_scale`
    multiplies promised lengths, and with `early_finish` the rest of a block is filler once all
    before a filler is written. A `variant` or `convention` names the one that the model must be
    of; None is the model's own. Raises `InvalidInput` for a bad value.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    seed: int = 0
    max_thread_tokens: int | None = None
    max_forks: int = 64
    max_rounds: int = 64
    steps_ratio: float = 1.0
    threshold: float | None = None
    order: str = "entropy"
    length_scale: float = 1.0
    early_finish: bool = False
    variant: str | None = None
    convention: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(_several("stop", self.stop)))
        stop_ids = _several("stop_ids", self.stop_ids)
        check_int("max_tokens", self.max_tokens, 1)
        check_int("top_k", self.top_k, 0)
        check_int("seed", self.seed, None)
        check_int("max_forks", self.max_forks, 0)
        check_int("max_rounds", self.max_rounds, 1)
        self._check_blocks()
        if self.max_thread_tokens is not None:
            check_int("max_thread_tokens", self.max_thread_tokens, 1)
        _check_real("temperature", self.temperature, 0, math.inf, "0 is greedy")
        _check_real("top_p", self.top_p, 0, 1, "1 keeps every token", open_low=True)
        _check_real(
            "repetition_penalty", self.repetition_penalty, 0, math.inf, "1 is none", open_low=True
        )
        for text in self.stop:
            if not isinstance(text, str) or not text or SURROGATE.search(text):
                raise InvalidInput(f"stop string {text!r} is empty or no text; leave it out")
        for token in stop_ids:
            check_int("stop id", token, 0)
        object.__setattr__(self, "stop_ids", frozenset(stop_ids))

    def set_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these fields that are not at their defaults."""
        usual = {field.name: field.default for field in fields(self)}
        return tuple(name for name in names if getattr(self, name) != usual[name])

    def without(self, names: Iterable[str]) -> SamplingParams:
        """A copy with these fields at their defaults."""
        usual: dict[str, Any] = {field.name: field.default for field in fields(self)}
        return replace(self, **{name: usual[name] for name in names})

    def _check_blocks(self) -> None:
        _check_real(
            "steps_ratio", self.steps_ratio, 0, 1, "1 writes one token a pass", open_low=True
        )
        _check_real("length_scale", self.length_scale, 0, 100, "1 is as promised", open_low=True)
        if self.threshold is not None:
            _check_real("threshold", self.threshold, 0, math.inf, "above 1 is one token a pass")
            if self.steps_ratio != 1:
                raise InvalidInput(
                    f"steps_ratio {self.steps_ratio} and threshold {self.threshold} are two "
                    "schedules; give one of them"
                )
        if self.order not in ORDERS:
            raise UnknownName("order", self.order, list(ORDERS))
        if not isinstance(self.early_finish, bool):
            raise InvalidInput(f"early_finish must be True or False, got {self.early_finish!r}")
        for name in ("variant", "convention"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidInput(f"{name} must be a name or None, got {value!r}")


def _several(name: str, values: object) -> list[Any]:
    """The values as a list; a string is one value."""
    if isinstance(values, str):
        return [values]
    if not isinstance(values, Iterable):
        raise InvalidInput(f"{name} must be several values, got {values!r}; () is none")
    return list(values)


def check_int(name: str, value: object, low: int | None) -> None:
    """Raises `InvalidInput` unless `value` is a whole number of at least `low` (None: any)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name} must be a whole number, got {value!r}")
    if low is not None and value < low:
        raise InvalidInput(f"{name} must be at least {low}, got {value}")


def check_seed(value: object) -> None:
    """Raises `InvalidInput` unless `value` seeds every generator of random numbers: NumPy takes no
    negative seed, and torch none beyond 64 bits."""
    check_int("seed", value, 0)
    if isinstance(value, int) and value > MAX_SEED:
        raise InvalidInput(f"seed must be at most {MAX_SEED}, got {value}")


def _check_real(
    name: str, value: object, low: float, high: float, hint: str, *, open_low: bool = False
) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max  # neither infinite nor NaN, of any size of int
    ):
        raise InvalidInput(f"{name} must be a finite number, got {value!r}; {hint}")
    if not (low < value <= high if open_low else low <= value <= high):
        bounds = f"{'above' if open_low else 'at least'} {low}"
        if high != math.inf:
            bounds += f" and at most {high}"
        raise InvalidInput(f"{name} must be {bounds}, got {value!r}; {hint}")
