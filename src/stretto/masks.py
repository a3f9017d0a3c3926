"""Masks of whole traces for training and for the reference pass, derived from `trace.visible`.

A trace is laid out flat, segment after segment; row q of a mask is what flat token q may attend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stretto.trace import Trace

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's mask function: (batch, head, query index, key index) -> visible."""


def flat_tokens(trace: Trace) -> Int[Tensor, "tokens"]:
    return torch.tensor([t for s in trace.segments for t in s.tokens], dtype=torch.long)


def flat_positions(trace: Trace) -> Int[Tensor, "tokens"]:
    return torch.tensor([p for s in trace.segments for p in s.positions], dtype=torch.long)


def dense_mask(trace: Trace) -> Bool[Tensor, "queries keys"]:
    """`visible` of every pair of flat tokens."""
    index = torch.arange(trace_length(trace))
    zero = torch.zeros(1, dtype=torch.long)
    return mask_mod(trace)(zero, zero, index[:, None], index[None, :])


def trace_length(trace: Trace) -> int:
    return sum(len(s) for s in trace.segments)


def mask_mod(trace: Trace, device: torch.device | str = "cpu") -> MaskMod:
    """`visible` as a FlexAttention `mask_mod` over flat indices of this trace."""
    lengths = torch.tensor([len(s) for s in trace.segments], dtype=torch.long, device=device)
    segment = torch.repeat_interleave(torch.arange(len(trace.segments), device=device), lengths)
    is_block = torch.tensor(
        [s.kind == "block" for s in trace.segments], dtype=torch.bool, device=device
    )
    sees = torch.zeros(len(trace.segments), len(trace.segments), dtype=torch.bool, device=device)
    for s in trace.segments:
        sees[s.id, sorted(s.sees)] = True

    def mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        q, k = segment[query], segment[key]
        own = (q == k) & (is_block[q] | (key <= query))
        return own | (sees[q, k] & (q != k))

    return mod
