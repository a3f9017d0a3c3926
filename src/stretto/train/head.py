"""The output head at the rows that predict something, in chunks: a vocabulary is wide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stretto.train.legal import UNMASKED, LegalTable

CHUNK = 128
"""Rows whose logits are in memory at once."""


@dataclass(frozen=True, eq=False)
class Head:
    """A model's output head: `weight`, and `soft_cap`, the c of c·tanh(logit / c), if any."""

    weight: Float[Tensor, "vocab hidden"]
    soft_cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = inner.get_output_embeddings()
        return cls(_weight_of(head), getattr(model.config, "final_logit_softcapping", None))

    def logits(self, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Float32 logits, as the model itself computes them."""
        logits = torch.nn.functional.linear(states, self.weight)
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits.float()


def _weight_of(head: Any) -> Tensor:
    adapter = getattr(head, "token_adapter", head)
    merged = getattr(adapter, "get_merged_weights", None)
    weight: Tensor = merged(adapter.active_adapters) if merged is not None else head.weight
    return weight


def masked_logprobs(
    states: Float[Tensor, "rows hidden"],
    head: Head,
    targets: Int[Tensor, "rows"],
    legal: Int[Tensor, "rows"],
    table: LegalTable,
) -> Float[Tensor, "rows"]:
    """The float32 log-softmax of each row's legal logits at its target."""
    parts = []
    for start in range(0, len(states), CHUNK):
        part = slice(start, start + CHUNK)
        inputs = states[part], head.weight, head.soft_cap, targets[part], legal[part], table
        parts.append(checkpoint(_chunk, *inputs, use_reentrant=False))
    return torch.cat(parts) if parts else states.new_zeros(0, dtype=torch.float32)


def _chunk(
    states: Tensor, weight: Tensor, cap: float | None, targets: Tensor, legal: Tensor,
    table: LegalTable,
) -> Tensor:  # fmt: skip
    logits = mask_illegal(Head(weight, cap).logits(states), legal, table)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def mask_illegal(
    logits: Float[Tensor, "rows vocab"], legal: Int[Tensor, "rows"], table: LegalTable
) -> Float[Tensor, "rows vocab"]:
    """The logits with -inf where a row's mask forbids."""
    hidden = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for number in legal.unique().tolist():
        if number == UNMASKED:
            continue
        ids, few_legal = table.ids(number)
        row = torch.full((logits.shape[1],), few_legal, dtype=torch.bool)
        row[torch.from_numpy(ids)] = not few_legal
        hidden[legal == number] = row.to(logits.device)
    return logits.masked_fill(hidden, -torch.inf)
