"""What an engine is: keys and values of a pool of slots, and logits for rows of a pass.

An engine promises that a row's logits are a function of its token, position and visible KV, to
1e-4 in float32 whatever else is in the batch. Only one that declares `batch_invariant` promises
bits. It knows neither requests nor dialects.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from stretto.runtime.views import Run


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
