"""Methods: ways to answer a prompt with a model. One file each; `get_method` finds one by name.

A method turns a chat into prompt ids and a session; the runtime does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from stretto.errors import UnknownName

if TYPE_CHECKING:
    from stretto.dialects.base import Session
    from stretto.lm import LM
    from stretto.params import SamplingParams

AUTO = "auto"
"""The model's own way: its dialect if it has one, else sequential decoding."""

METHODS = ("sequential", "sot")
"""Methods for any model; a model's dialect is a method of that model too."""


class Method(Protocol):
    @property
    def name(self) -> str: ...

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], Session]:
        """Prompt ids and a fresh session. A string is text as it is, without a chat template."""
        ...


def check_method(name: str, dialect: str | None = None) -> None:
    """Raises `UnknownName` unless a model of `dialect` (None: any) can be run by `name`."""
    from stretto.dialects import DIALECTS

    dialects = DIALECTS if dialect is None else (dialect,)
    known = [AUTO, *METHODS, *(d for d in dialects if d != "plain")]
    if name not in known:
        raise UnknownName("method", name, known)


def get_method(name: str, dialect: str) -> Method:
    """The method `name` for a model of `dialect`. Raises `UnknownName`."""
    from stretto.methods.native import Native
    from stretto.methods.sequential import Sequential
    from stretto.methods.sot import SkeletonOfThought

    check_method(name, dialect)
    if name == AUTO:
        name = "sequential" if dialect == "plain" else dialect
    if name == "sequential":
        return Sequential()
    return SkeletonOfThought() if name == "sot" else Native(name)
