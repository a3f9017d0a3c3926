"""Policies: rules that hide keys and values of a request, apart from what its dialect says.

A policy is one object a request. It sees what a thread sees and answers with effects, so what it
hides is hidden in the trace, in every mask, and in the pool, like anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from stretto.effects import Cut, Evict
from stretto.recorder import OpenThread, Recorder


@runtime_checkable
class Policy(Protocol):
    """What one request hides. `act` reads threads and never changes them."""

    name: str
    wants_attention: bool
    """Whether `act` needs the attention mass of the thread's rows: the engine must give it."""
    is_reindexed: bool
    """Whether rows and what they see are rotated to their places among the visible tokens of the
    pass, instead of their positions: the engine must be able to."""

    def cuts(self, num_prompt_tokens: int) -> list[int]:
        """The indices of prompt tokens, rising and none of them 0, at which a new segment begins:
        only whole segments can be hidden."""
        ...

    def act(
        self, recorder: Recorder, thread: OpenThread, attention: Mapping[int, float] | None
    ) -> list[Cut | Evict]:
        """Called before each token that the thread places.

        `attention`: by segment handle, what the thread's rows so far have attended to, each row
        adding 1 in all; None unless it was wanted.
        """
        ...
