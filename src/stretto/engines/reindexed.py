"""Re-indexed positions of engine `hf`: a row stands at its place among the tokens it sees.

StreamingLLM (Xiao et al. 2023, section 3.2): with tokens 0 1 2 3 6 7 8 in the cache, they stand at
0 to 6 and the next one at 7. Keys lie in the pool as they were rotated when they were written, and
are never changed: a pass works on a gathered copy, rotated on by the difference of positions.
Default RoPE only: there a rotation by a and then by b is one by a + b.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stretto.runtime.views import ListCursor, Run


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one view that all see what it saw before them, and one another backwards.

    `base`: the visible slots before them, in trace order. Row j stands at `len(base) + j`.
    """

    runs: list[Run]
    base: list[int]

    @property
    def slots(self) -> list[int]:
        return [slot for run in self.runs for slot in run.slots]


@dataclass(frozen=True, slots=True)
class Gather:
    """What a layer of such a pass reads besides its own rows: `slots`, their keys turned on by
    the angles of which these are cosines and sines."""

    slots: Int[Tensor, "seen"]
    cos: Float[Tensor, "seen head_dim"]
    sin: Float[Tensor, "seen head_dim"]

    def keys(self, pool: Float[Tensor, "1 kv_heads pool head_dim"]) -> Tensor:
        """A rotated copy of the keys: (1, kv_heads, seen, head_dim)."""
        copy = pool[:, :, self.slots]
        half = copy.shape[-1] // 2
        turned = torch.cat((-copy[..., half:], copy[..., :half]), dim=-1)
        return (copy * self.cos + turned * self.sin).to(copy.dtype)  # computed in float32


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows and columns of one pass over some blocks.

    Columns: what each block has before it, block after block, then the rows themselves.
    """

    blocks: list[Block]

    @property
    def runs(self) -> list[Run]:
        return [run for block in self.blocks for run in block.runs]

    def positions(self) -> list[int]:
        return [len(b.base) + j for b in self.blocks for j in range(len(b.slots))]

    def seen(self) -> list[int]:
        return [slot for block in self.blocks for slot in block.base]

    def seen_positions(self) -> list[int]:
        return [place for block in self.blocks for place in range(len(block.base))]

    def mask(self) -> Bool[Tensor, "rows columns"]:
        bases = [len(block.base) for block in self.blocks]
        sizes = [len(block.slots) for block in self.blocks]
        mask = torch.zeros(sum(sizes), sum(bases) + sum(sizes), dtype=torch.bool)
        row, column = 0, 0
        for base, size in zip(bases, sizes, strict=True):
            mask[row : row + size, column : column + base] = True
            own = sum(bases) + row
            mask[row : row + size, own : own + size] = torch.tril(torch.ones(size, size)).bool()
            row, column = row + size, column + base
        return mask


def plans(runs: list[Run]) -> Iterator[Plan]:
    """The passes that feed the runs, which are all of re-indexed views: one, unless a view hides
    something between two of its runs. A plan is to be run before the next one is asked for."""
    waiting = [list(_blocks(own)) for _, own in groupby(runs, lambda run: id(run.view))]
    while waiting:
        yield Plan([_with_base(blocks.pop(0)) for blocks in waiting])
        waiting = [blocks for blocks in waiting if blocks]


def _blocks(runs: Iterator[Run]) -> Iterator[list[Run]]:
    """Runs of one view, together as long as it only goes on in a new segment."""
    block: list[Run] = []
    for run in runs:
        if run.segment.kind != "causal":
            raise AssertionError("a block segment has no re-indexed positions")
        if block and not _goes_on(block[-1], run):
            yield block
            block = []
        block.append(run)
    yield block


def _goes_on(before: Run, run: Run) -> bool:
    changes = run.view.thread.changes[before.version : run.version]
    return all(change == ("cut", before.segment.handle) for change in changes)


def _with_base(runs: list[Run]) -> Block:
    first, view = runs[0], runs[0].view
    if view.cursor is None or view.cursor.epoch != view.memory.epoch:
        view.cursor = ListCursor(view.memory.epoch)
    cursor = view.cursor
    cursor.advance(view, first.version, first.segment.handle, first.start)
    base = cursor.slots[: cursor.length].tolist()
    cursor.extend(first.slots)
    return Block(runs, base)


def angles(
    model: Any, by: Int[Tensor, "seen"]
) -> tuple[Float[Tensor, "seen head_dim"], Float[Tensor, "seen head_dim"]]:
    """Cosines and sines that turn keys on `by` so many positions, for each number of a head."""
    inverse = model.model.rotary_emb.inv_freq.float()
    angle = by[:, None].float() * inverse[None]
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def refusal(model: Any, window: int | None) -> str | None:
    """Why a model's keys cannot be turned on; None if they can."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    by_type = [value for value in rope.values() if isinstance(value, dict)]
    for each in by_type or [rope]:
        kind = each.get("rope_type", each.get("type", "default"))
        if kind != "default":
            return f"that is for default RoPE, and the model's is {kind!r}"
    if window is not None:
        return f"the model has sliding layers (window {window}), which go by position"
    return None
