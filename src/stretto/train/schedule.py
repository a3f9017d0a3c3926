"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stretto.errors import InvalidInput, UnknownName

Shape = Literal["linear", "cosine", "constant"]
SHAPES: tuple[Shape, ...] = ("linear", "cosine", "constant")


@dataclass(frozen=True)
class Schedule:
    """Rises over the first `warmup` steps, then falls to 0 after the last one, or stays.

    `warmup` below 1 is a share of all steps.
    """

    lr: float
    shape: Shape = "linear"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UnknownName("schedule", self.shape, list(SHAPES))
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise InvalidInput(f"lr is {self.lr}; it must be more than 0")
        if not (self.warmup >= 0 and math.isfinite(self.warmup)):
            raise InvalidInput(f"warmup is {self.warmup}; it must be at least 0")

    def lr_at(self, step: int, num_steps: int) -> float:
        """The rate of step `step`, from 0, of `num_steps`."""
        warmup = self.warmup * num_steps if self.warmup < 1 else self.warmup
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        if self.shape == "constant":
            return self.lr
        done = (step - warmup) / max(1.0, num_steps - warmup)
        if self.shape == "linear":
            return self.lr * (1 - done)
        return self.lr * (1 + math.cos(math.pi * done)) / 2
