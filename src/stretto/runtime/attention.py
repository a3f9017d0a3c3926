"""Attention mass: how much the rows of a view have attended to each segment they see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stretto.runtime.views import Run


class AttentionTotals(dict[int, float]):
    """Of one view, the attention mass of its rows so far, by segment handle.

    A row's mass is its attention weights summed over layers and heads and divided by their number:
    1 in all. Sums are of this view alone, never over a batch.
    """

    def add(self, run: Run, mass: Float[NDArray[np.floating], "rows width"]) -> None:
        """Adds a run's rows. Columns are the pool's slots up to the last one that is seen."""
        by_slot = mass.sum(axis=0, dtype=np.float64)
        memory, width = run.view.memory, len(by_slot)
        for handle in {*run.view.thread.sees, run.segment.handle}:
            slots = memory.slots.get(handle)
            if slots is not None and slots.slots:
                places = np.asarray(slots.slots)
                seen = float(by_slot[places[places < width]].sum())
                self[handle] = self.get(handle, 0.0) + seen
