"""A stub engine: exact, fast, without a model. For tests of counts, fuzzing and scheduling."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.runtime.views import Run, mask_rows

State = NDArray[np.uint64]


class StubEngine:
    """An engine whose logits are hashes, bit for bit the same whatever else is in the batch.

    It keeps two "layers" of one number a slot, as a two-layer model keeps keys: a row's first
    number is a hash of its token and position, its second of the first numbers it sees, and its
    logits (uniform in [-spread, spread)) are hashes of the second numbers it sees. So logits tell
    a wrong mask, slot, position, or KV recomputed under another view, as a real model's would.

    `num_passes`, `num_rows` and `num_logit_rows` count what `forward` was given.
    """

    name = "stub"
    batch_invariant = True

    def __init__(
        self, vocab_size: int = 64, max_positions: int = 512, num_slots: int = 1024,
        spread: float = 4.0,
    ) -> None:  # fmt: skip
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.num_slots = num_slots
        self.spread = spread
        self.state: State = np.zeros((2, num_slots), dtype=np.uint64)
        self.num_passes = 0
        self.num_rows = 0
        self.num_logit_rows = 0
        self._ids = _mix(np.arange(1, vocab_size + 1, dtype=np.uint64))

    def forward(self, runs: list[Run]) -> Tensor:
        mask = mask_rows(runs, self.num_slots)
        tokens = np.array([t for r in runs for t in r.tokens], dtype=np.uint64)
        positions = np.array([p for r in runs for p in r.positions], dtype=np.uint64)
        slots = [s for r in runs for s in r.slots]
        if len(set(slots)) != len(slots):
            raise AssertionError(f"two rows of a pass share a slot: {sorted(slots)}")
        if not mask[np.arange(len(slots)), slots].all():
            raise AssertionError("a row of a pass does not see itself")
        first = _mix(tokens * np.uint64(1 << 32) + positions)
        self.state[0, slots] = first
        second = _mix(first + self._seen(0, mask))
        self.state[1, slots] = second
        last = _mix(second + self._seen(1, mask))
        wanted = [i for run in _bounds(runs) for i in run]
        self.num_passes += 1
        self.num_rows += len(slots)
        self.num_logit_rows += len(wanted)
        hashes = _mix(last[wanted, None] + self._ids)
        unit = (hashes >> np.uint64(11)) / float(1 << 53)
        return torch.from_numpy(((2 * unit - 1) * self.spread).astype(np.float32))

    def copy_out(self, slots: list[int]) -> State:
        return self.state[:, slots].copy()

    def copy_in(self, slots: list[int], kept: State) -> None:
        self.state[:, slots] = kept

    def _seen(self, layer: int, mask: NDArray[np.bool_]) -> State:
        """Per row, the sum (modulo 2^64) of one layer's numbers in the slots it sees."""
        state = self.state[layer, : mask.shape[1]]
        return np.where(mask, state, np.uint64(0)).sum(axis=1, dtype=np.uint64)


def _bounds(runs: list[Run]) -> list[list[int]]:
    """Of each run, the rows of the pass whose logits are wanted."""
    wanted, at = [], 0
    for run in runs:
        wanted.append([at + row for row in run.kept])
        at += len(run.tokens)
    return wanted


def _mix(x: State) -> State:
    """SplitMix64's finaliser (Steele et al. 2014): a bijection that scatters all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
