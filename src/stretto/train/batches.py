"""Batches: several examples in one sequence, none of which sees another, and the model's masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stretto.engines.hf import WITHOUT_LAYER_TYPES, attention_for, sliding_window
from stretto.train.examples import IGNORE, Example
from stretto.train.legal import LegalTable


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples laid end to end as one sequence of a model; each keeps its own positions.

    `bounds[e]` are the first token of example `e` and the one after its last; `segment` numbers
    segments over the whole batch. `rows` are the tokens that predict something, in order; with
    them go `targets`, `classes`, `legal` (numbers of masks in `table`) and `owner`, the example.
    """

    ids: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    segment: Int[Tensor, "tokens"]
    sees: Bool[Tensor, "segments segments"]
    is_block: Bool[Tensor, "segments"]
    bounds: tuple[tuple[int, int], ...]
    rows: Int[Tensor, "targets"]
    targets: Int[Tensor, "targets"]
    classes: Int[Tensor, "targets"]
    legal: Int[Tensor, "targets"]
    owner: Int[Tensor, "targets"]
    table: LegalTable
    keys: tuple[str, ...]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Batch:
        """The batch of some examples, which were made by one maker. None may be empty."""
        if len({id(e.table) for e in examples}) != 1:
            raise ValueError("a batch takes examples of one maker, and at least one of them")
        starts = _offsets([len(e) for e in examples])
        segments = _offsets([len(e.is_block) for e in examples])
        rows = [(e.targets != IGNORE).nonzero()[:, 0] for e in examples]
        pairs = list(zip(examples, rows, strict=True))
        return cls(
            ids=torch.cat([e.ids for e in examples]),
            positions=torch.cat([e.positions for e in examples]),
            segment=torch.cat([e.segment + segments[k] for k, e in enumerate(examples)]),
            sees=_block_diagonal([e.sees for e in examples]),
            is_block=torch.cat([e.is_block for e in examples]),
            bounds=tuple(
                (starts[k], starts[k] + len(e)) for k, e in enumerate(examples)
            ),
            rows=torch.cat([r + starts[k] for k, r in enumerate(rows)]),
            targets=torch.cat([e.targets[r] for e, r in pairs]),
            classes=torch.cat([e.classes[r] for e, r in pairs]),
            legal=torch.cat([e.legal[r] for e, r in pairs]),
            owner=_repeat([len(r) for r in rows]),
            table=examples[0].table,
            keys=tuple(e.key for e in examples),
        )  # fmt: skip

    @property
    def num_examples(self) -> int:
        return len(self.keys)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device | str) -> Batch:
        """The batch with its tensors on a device."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def visible(self, start: int = 0, end: int | None = None) -> Bool[Tensor, "queries keys"]:
        """`trace.visible` of each pair of the tokens from `start` to `end`."""
        segment = self.segment[start:end]
        query, key = segment[:, None], segment[None, :]
        index = torch.arange(len(segment), device=segment.device)
        own = (query == key) & (self.is_block[query] | (index[None, :] <= index[:, None]))
        return own | (self.sees[query, key] & (query != key))


def model_masks(batch: Batch, config: Any, dtype: torch.dtype) -> Any:
    """What a Hugging Face model takes as `attention_mask`, as `engines.hf` gives it: a mask of
    each layer type or, for a model without layer types, one."""
    visible, positions = batch.visible(), batch.positions
    masks = {"full_attention": visible[None, None]}
    window = sliding_window(config)
    if window is not None:
        near = positions[None, :] > positions[:, None] - window
        masks["sliding_attention"] = (visible & near)[None, None]
    if attention_for(config.model_type) == "eager":
        masks = {kind: additive(mask, dtype) for kind, mask in masks.items()}
    return masks["full_attention"] if config.model_type in WITHOUT_LAYER_TYPES else masks


def additive(mask: Bool[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """0 where a token may attend, else the dtype's lowest number: it weighs an exact 0, since
    every token sees itself."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _block_diagonal(blocks: list[Tensor]) -> Bool[Tensor, "n n"]:
    size, at = sum(map(len, blocks)), 0
    whole = torch.zeros(size, size, dtype=torch.bool)
    for block in blocks:
        whole[at : at + len(block), at : at + len(block)] = block
        at += len(block)
    return whole


def _offsets(lengths: list[int]) -> list[int]:
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return starts


def _repeat(counts: list[int]) -> Int[Tensor, "n"]:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
