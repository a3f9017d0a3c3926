"""Attention mass of a pass of engine `hf`: transformers' own eager attention, listened to.

SDPA never has a row's weights in memory, so a pass that is asked for them runs with eager
attention, which computes the same softmax explicitly and returns it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from stretto.runtime.views import Run


class Mass:
    """The weights of a pass, summed over layers and heads as they come, `layers`, `heads` many."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._num_summed = 0

    def take(self, weights: Float[Tensor, "1 heads rows width"]) -> None:
        """Adds one layer's weights. With grouped queries every query head counts."""
        summed = weights[0].sum(dim=0, dtype=torch.float32)
        self._total = summed if self._total is None else self._total + summed
        self._num_summed += weights.shape[1]

    def rows(self) -> Float[Tensor, "rows width"]:
        """The mass of each row in each slot; a row's is 1 in all."""
        if self._total is None:
            raise AssertionError("the pass has run no attention layer")
        return (self._total / self._num_summed).cpu()

    def hand_over(self, runs: list[Run]) -> None:
        """Adds each run's rows to what its view has attended to."""
        mass, at = self.rows().numpy(), 0
        for run in runs:
            stop = at + len(run.tokens)
            if run.view.attention is not None:
                run.view.attention.add(run, mass[at:stop])
            at = stop


@contextmanager
def eager(model: Any) -> Iterator[Mass]:
    """Within the block the model's attention is eager, which wants additive masks, and what its
    layers return is summed."""
    mass, config = Mass(), model.config
    usual = config._attn_implementation

    def listen(module: Any, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        mass.take(outputs[1])

    handles = [layer.self_attn.register_forward_hook(listen) for layer in model.model.layers]
    config._attn_implementation = "eager"
    try:
        yield mass
    finally:
        config._attn_implementation = usual
        for handle in handles:
            handle.remove()
