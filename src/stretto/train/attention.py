"""Attention example by example: what no example of a batch sees of another is not computed.

The reference is one pass under the dense mask of `batches.model_masks`; this differs from it by
rounding alone. On a CPU it is several times faster: matrix products instead of SDPA's own loops,
and nothing between examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from stretto.engines.hf import WITHOUT_LAYER_TYPES, attention_for, sliding_window
from stretto.train.batches import Batch, additive

NAME = "stretto_examples"
"""Of this attention in transformers, and of the argument that carries the masks to it."""

QUERIES = 256
"""Rows of one product: keys that none of them sees are left out, half of all in a long answer."""

LONGEST_PRODUCT = 1024
"""Tokens of an example up to which all its scores are held; beyond, SDPA keeps memory flat."""


@dataclass(frozen=True, eq=False)
class ExampleMasks:
    """The bounds of a batch's examples, and of each the additive mask of each layer type.

    `reach[e]` holds, for each run of `QUERIES` rows, the first key that none of them sees and that
    nothing seen comes after.
    """

    bounds: tuple[tuple[int, int], ...]
    masks: dict[str, list[Float[Tensor, "tokens tokens"]]]
    reach: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, batch: Batch, config: Any, dtype: torch.dtype) -> ExampleMasks:
        window = sliding_window(config)
        masks: dict[str, list[Tensor]] = {"full_attention": []}
        if window is not None:
            masks["sliding_attention"] = []
        reach = []
        for start, end in batch.bounds:
            visible = batch.visible(start, end)
            last = [int(part.any(0).nonzero().max()) + 1 for part in torch.split(visible, QUERIES)]
            reach.append(tuple(last))
            masks["full_attention"].append(additive(visible, dtype))
            if window is not None:
                at = batch.positions[start:end]
                near = at[None, :] > at[:, None] - window
                masks["sliding_attention"].append(additive(visible & near, dtype))
        return cls(batch.bounds, masks, tuple(reach))


def suits(model: Any, batch: Batch) -> bool:
    """Whether a pass may take this way: on a CPU, for architectures whose attention is plain."""
    config = model.config
    return (
        batch.ids.device.type == "cpu"
        and attention_for(config.model_type) == "sdpa"
        and not getattr(config, "attention_dropout", 0.0)
    )


@contextmanager
def by_example(config: Any, masks: ExampleMasks) -> Iterator[dict[str, Any]]:
    """The arguments under which a model of this config attends example by example."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    unused = torch.zeros(1, 1, 1, 1)  # a mask of four dimensions is handed on as it is
    has_types = config.model_type not in WITHOUT_LAYER_TYPES
    mask: Any = dict.fromkeys(masks.masks, unused) if has_types else unused
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield {"attention_mask": mask, NAME: masks}
    finally:
        config._attn_implementation = before


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer: (1, heads, tokens, head_dim) to (1, tokens, heads, head_dim)."""
    own: ExampleMasks = options[NAME]
    config = module.config
    typed = config.model_type not in WITHOUT_LAYER_TYPES and len(own.masks) > 1
    kind = config.layer_types[module.layer_idx] if typed else "full_attention"
    parts = []
    for (start, end), mask, reach in zip(own.bounds, own.masks[kind], own.reach, strict=True):
        q, k, v = (states[0, :, start:end] for states in (query, key, value))
        if end - start > LONGEST_PRODUCT:
            parts.append(_by_sdpa(q, k, v, mask, scaling).transpose(0, 1))
            continue
        for first, last in zip(range(0, end - start, QUERIES), reach, strict=True):
            rows = slice(first, first + QUERIES)
            part = _by_products(q[:, rows], k[:, :last], v[:, :last], mask[rows, :last], scaling)
            parts.append(part.transpose(0, 1))
    return torch.cat(parts)[None], None


def _by_products(
    query: Float[Tensor, "heads tokens dim"],
    key: Float[Tensor, "kv_heads keys dim"],
    value: Float[Tensor, "kv_heads keys dim"],
    mask: Float[Tensor, "tokens keys"],
    scaling: float,
) -> Float[Tensor, "heads tokens dim"]:
    (heads, tokens, dim), num_keys = query.shape, key.shape[1]
    groups = heads // key.shape[0]
    rows = (query * scaling).reshape(-1, groups * tokens, dim)
    scores = torch.bmm(rows, key.transpose(1, 2)).view(-1, groups, tokens, num_keys) + mask
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights.view(-1, groups * tokens, num_keys), value).view(heads, tokens, dim)


def _by_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    groups = query.shape[0] // key.shape[0]
    key, value = (states.repeat_interleave(groups, dim=0) for states in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask[None, None], scale=scaling
    )[0]
