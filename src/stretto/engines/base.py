"""What an engine is: keys and values of a pool of slots, and logits for rows of a pass.

An engine promises that a row's logits are a function of its token, position and visible KV, to
1e-4 in float32 whatever else is in the batch. Only one that declares `batch_invariant` promises
bits. It knows neither requests nor dialects.

Some engines can do more than that, on request of a view (`Extra`); one that cannot says so in its
`refusal`, and the request is refused by name. One whose passes read all slots up to the last that
is seen has `prefers_low_slots`, and what prompts begin with is then kept on low ones only.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from stretto.errors import Unsupported
from stretto.runtime.views import Run

Extra = Literal["attention mass", "re-indexed positions"]
"""attention mass: adds each row's attention weights to `view.attention`. re-indexed positions:
rotates rows and what they see to their places among what is visible."""


@runtime_checkable
class Engine(Protocol):
    name: str
    batch_invariant: bool
    vocab_size: int
    """Rows of the output head."""
    max_positions: int
    """How many positions the model has."""
    num_slots: int
    """Slots of the pool."""

    def forward(self, runs: list[Run]) -> Float[Tensor, "logit_rows vocab"]:
        """Writes the rows' keys and values into their slots; float32 logits, on the CPU, of the
        rows that want them, in row order. Every row sees at least itself."""
        ...

    def copy_out(self, slots: list[int]) -> Any:
        """The keys and values of some slots, bit for bit, in memory of their own."""
        ...

    def copy_in(self, slots: list[int], kept: Any) -> None:
        """Puts what `copy_out` returned into slots, in the same order."""
        ...


def require(engine: Engine, extra: Extra, user: str) -> None:
    """Raises `Unsupported` unless the engine can do `extra`, which `user` needs.

    An engine without a method `refusal(extra)`, None or the reason, can do nothing extra.
    """
    refusal = getattr(engine, "refusal", None)
    reason = f"engine {engine.name!r} has none" if refusal is None else refusal(extra)
    if reason is not None:
        raise Unsupported(f"{user} needs {extra}, but {reason}; use engine 'hf' or another method")
