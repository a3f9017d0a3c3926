"""The output head at the rows that predict something, in chunks: a vocabulary is wide.

The plain way is `Head.logits`, `mask_illegal`, and a log-softmax; `masked_logprobs` gives the same
to rounding, without all logits in memory as float32 and without computing them twice. (Soft-capped
heads, those of Gemma 2, take the plain way.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from stretto.errors import Unsupported
from stretto.train.legal import UNMASKED, LegalTable

CHUNK = 256
"""Rows of one matrix product."""

SLICE = 16
"""Rows whose float32 logits are in a CPU's cache at once."""


@dataclass(frozen=True, eq=False)
class Head:
    """A model's output head.

    `weight`, of which rows `new_ids` are `new_rows` instead, if those are given (they are what is
    trained of it), and `soft_cap`, the c of c·tanh(logit / c), if any.
    """

    weight: Float[Tensor, "vocab hidden"]
    new_ids: Int[Tensor, "new"] | None = None
    new_rows: Float[Tensor, "new hidden"] | None = None
    soft_cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a causal LM, or of a PEFT model of one. Raises `Unsupported` for a bias."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        layer = inner.get_output_embeddings()
        base = layer.token_adapter.get_base_layer() if hasattr(layer, "token_adapter") else layer
        if getattr(base, "bias", None) is not None:
            raise Unsupported("the model's output head has a bias, which training does not know")
        cap = getattr(model.config, "final_logit_softcapping", None)
        weight, ids, rows = rows_of(layer)
        return cls(weight, ids, rows, cap)

    def logits(self, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """The logits, in the dtype of the states, as the model itself computes them."""
        logits = functional.linear(states, self.weight)
        if self.new_ids is not None and self.new_rows is not None:
            logits = logits.index_copy(1, self.new_ids, functional.linear(states, self.new_rows))
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def rows_of(layer: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The weight of an embedding or head; with PEFT's trainable tokens, their ids and rows too."""
    adapter = getattr(layer, "token_adapter", layer)
    if not hasattr(adapter, "trainable_tokens_delta"):
        return layer.weight, None, None
    (name,) = adapter.active_adapters
    rows = adapter.trainable_tokens_delta[name]
    ids = torch.tensor(list(adapter.token_indices[name]), device=rows.device)
    weight: Tensor = adapter.get_base_layer().weight
    return weight, ids, rows.to(weight.dtype)


def masked_logprobs(
    states: Float[Tensor, "rows hidden"],
    head: Head,
    targets: Int[Tensor, "rows"],
    legal: Int[Tensor, "rows"],
    table: LegalTable,
) -> Float[Tensor, "rows"]:
    """The float32 log-softmax of each row's legal logits at its target."""
    rules = Rules(legal, table)
    if head.soft_cap is not None:
        logits = rules.mask(head.logits(states).float())
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    new_ids = targets.new_zeros(0) if head.new_ids is None else head.new_ids
    new_rows = states.new_zeros(0, states.shape[1]) if head.new_rows is None else head.new_rows
    found: Tensor = _LogProbs.apply(  # type: ignore[no-untyped-call]
        states, head.weight, new_rows, new_ids, targets, rules.mask_slice
    )
    return found


class _LogProbs(torch.autograd.Function):
    """`masked_logprobs` that keeps the probabilities, in the dtype of the states, for its way
    back: d logprob / d logits = (1 at the target) - probabilities."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        new_rows: Tensor,
        new_ids: Tensor,
        targets: Tensor,
        mask: Callable[[Tensor, int], Tensor],
    ) -> Tensor:
        found = torch.empty(len(states), dtype=torch.float32, device=states.device)
        kept = []
        for start in range(0, len(states), CHUNK):
            part = states[start : start + CHUNK]
            logits = functional.linear(part, weight)
            if len(new_ids):
                logits[:, new_ids] = functional.linear(part, new_rows)
            step = SLICE if part.device.type == "cpu" else CHUNK
            for first in range(0, len(part), step):
                rows = slice(first, min(first + step, len(part)))
                at = slice(start + rows.start, start + rows.stop)
                scores = mask(logits[rows].float(), at.start)
                total = scores.logsumexp(-1)
                found[at] = scores.gather(1, targets[at, None])[:, 0] - total
                logits[rows] = scores.sub_(total[:, None]).exp_()
            kept.append(logits)
        ctx.save_for_backward(states, weight, new_rows, new_ids, targets, *kept)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, new_rows, new_ids, targets, *kept = ctx.saved_tensors
        wants_states, wants_weight, wants_rows = ctx.needs_input_grad[:3]
        of_states = torch.empty_like(states) if wants_states else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        of_rows = torch.zeros_like(new_rows) if wants_rows else None
        start = 0
        for probabilities in kept:
            part = slice(start, start + len(probabilities))
            scale = grad[part, None].to(probabilities.dtype)
            slopes = probabilities.mul_(-scale)
            slopes.scatter_add_(1, targets[part, None], scale)
            if of_rows is not None:
                of_rows += slopes[:, new_ids].t() @ states[part]
            if of_weight is not None:
                of_weight += slopes.t() @ states[part]
            if of_states is not None:
                known = slopes.index_fill(1, new_ids, 0.0) if len(new_ids) else slopes
                of_states[part] = known @ weight
                if len(new_ids):
                    of_states[part] += slopes[:, new_ids] @ new_rows
            start = part.stop
        return of_states, of_weight, of_rows, None, None, None


class Rules:
    """The masks of many rows, applied to their logits in place: -inf where illegal."""

    def __init__(self, legal: Int[Tensor, "rows"], table: LegalTable) -> None:
        self._legal: list[int] = legal.tolist()
        self._ids: dict[int, tuple[Tensor, bool]] = {}
        for number in set(self._legal) - {UNMASKED}:
            ids, few_legal = table.ids(number)
            self._ids[number] = torch.from_numpy(ids).to(legal.device), few_legal

    def mask(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """A copy with -inf; for logits with a gradient."""
        return logits.masked_fill(self._hidden(logits), -torch.inf)

    def mask_slice(self, logits: Float[Tensor, "part vocab"], start: int) -> Tensor:
        """The logits of the rows from `start` on, changed in place; without a gradient."""
        numbers = self._legal[start : start + len(logits)]
        for number in set(numbers) - {UNMASKED}:
            ids, few_legal = self._ids[number]
            rows = [k for k, n in enumerate(numbers) if n == number]
            place = torch.tensor(rows, device=logits.device)[:, None], ids[None, :]
            if not few_legal:
                logits[place] = -torch.inf
                continue
            kept = logits[place]
            logits[rows] = -torch.inf
            logits[place] = kept
        return logits

    def _hidden(self, logits: Tensor) -> Bool[Tensor, "rows vocab"]:
        hidden = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        for row, number in enumerate(self._legal):
            if number != UNMASKED:
                ids, few_legal = self._ids[number]
                hidden[row] = few_legal
                hidden[row, ids] = not few_legal
        return hidden
