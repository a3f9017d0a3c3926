"""Dense decoding: nothing is hidden. What every budget is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.methods.sequential import Sequential


@dataclass(frozen=True)
class Dense(Sequential):
    """Decodes like method `sequential`, under the name that experiments on budgets give it."""

    name: str = "dense"
