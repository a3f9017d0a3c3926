"""Which examples are in which step, and which share a sequence: a function of the seed alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stretto.errors import InvalidInput

Pack = tuple[int, ...]
"""Numbers of groups that go through the model as one sequence."""


class Steps(Protocol):
    """What a training loop works through. A function of its settings: asked again, it answers the
    same, so that a resumed run goes on as if it had never stopped."""

    @property
    def num_steps(self) -> int: ...

    def packs(self, step: int) -> list[Pack]:
        """The sequences of a step, from 0. The step's gradient is over all of them."""
        ...


@dataclass(frozen=True)
class BatchSize:
    """How much goes into one step: so many groups, or groups of so many tokens in all."""

    groups: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.tokens is None):
            raise InvalidInput("a batch is a number of examples or of tokens; give one of the two")
        if (value := self.groups or self.tokens or 0) < 1:
            raise InvalidInput(f"a batch of {value} has nothing in it; give at least 1")


class PackedSteps:
    """Groups of examples, shuffled anew each epoch, cut into steps, and packed within each step.

    A group (an example, or a pair to be compared) stays together; `lengths[g]` are its tokens. A
    pack has at most `pack_tokens`, unless one group alone has more. `epochs` may be fractional:
    the last one is then cut short. `max_steps` ends it all sooner.
    """

    def __init__(
        self, lengths: Sequence[int], size: BatchSize, *, pack_tokens: int, epochs: float = 1.0,
        seed: int = 0, max_steps: int | None = None,
    ) -> None:  # fmt: skip
        if not lengths:
            raise InvalidInput("there is nothing to train on; check the data")
        if not 0 < epochs < math.inf:
            raise InvalidInput(f"epochs is {epochs}; it must be a number above 0")
        self._lengths = lengths
        self._size = size
        self._pack_tokens = pack_tokens
        self._seed = seed
        whole, part = divmod(epochs, 1)
        epoch_steps = [self._epoch(e) for e in range(int(whole))]
        if part:
            last = self._epoch(int(whole))
            epoch_steps.append(last[: max(1, round(part * len(last)))])
        steps = [step for epoch in epoch_steps for step in epoch]
        self._steps = steps if max_steps is None else steps[:max_steps]

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def groups(self, step: int) -> list[int]:
        """The groups of a step, in shuffled order."""
        return list(self._steps[step])

    def packs(self, step: int) -> list[Pack]:
        return pack(self._steps[step], lambda g: self._lengths[g], self._pack_tokens)

    def _epoch(self, number: int) -> list[list[int]]:
        order = np.random.default_rng([self._seed, number]).permutation(len(self._lengths))
        steps: list[list[int]] = []
        num_tokens = 0
        for group in order.tolist():
            if not steps or self._is_full(steps[-1], num_tokens + self._lengths[group]):
                steps.append([])
                num_tokens = 0
            steps[-1].append(group)
            num_tokens += self._lengths[group]
        return steps

    def _is_full(self, step: list[int], num_tokens: int) -> bool:
        if self._size.groups is not None:
            return len(step) >= self._size.groups
        return self._size.tokens is not None and num_tokens > self._size.tokens


def pack(groups: Sequence[int], length: Callable[[int], int], capacity: int) -> list[Pack]:
    """Groups into as few sequences as first-fit decreasing finds (at most 11/9 of the fewest, plus
    one). Ties keep their order, so the result is a function of the arguments."""
    bins: list[list[int]] = []
    room: list[int] = []
    for group in sorted(groups, key=length, reverse=True):
        size = length(group)
        place = next((k for k, free in enumerate(room) if free >= size), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(group)
        room[place] -= size
    return [tuple(b) for b in bins]
