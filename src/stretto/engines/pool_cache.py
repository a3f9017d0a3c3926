"""The pool's keys and values as a cache of transformers' models."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from stretto.engines.reindexed import Gather
from stretto.errors import InvalidInput


class PoolCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of all slots, zero-filled: a masked NaN would leak through the values.

    `update` writes a pass's rows to `slots` and returns the pool up to `width`; under a `gather`
    what that reads, and the rows after it.
    """

    keys: list[Float[Tensor, "1 kv_heads slots head_dim"]]
    values: list[Float[Tensor, "1 kv_heads slots head_dim"]]

    def __init__(self, config: Any, num_slots: int, dtype: torch.dtype, device: Any) -> None:
        super().__init__(layers=[])
        shape = (1, config.num_key_value_heads, num_slots, head_dim(config))
        count = range(config.num_hidden_layers)
        try:
            self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in count]
            self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in count]
        except (RuntimeError, TypeError) as error:  # TypeError: a size beyond 64 bits
            raise pool_too_large(config, num_slots, dtype, device) from error
        self.slots = torch.zeros(0, dtype=torch.long, device=device)
        self.width = 0
        self.gather: Gather | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        if self.gather is not None:
            seen_keys, seen_values = self.gather.keys(keys), values[:, :, self.gather.slots]
            return torch.cat((seen_keys, key_states), 2), torch.cat((seen_values, value_states), 2)
        return keys[:, :, : self.width], values[:, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width

    def copy_out(self, slots: Int[Tensor, "n"]) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of some slots, in memory of their own."""
        pairs = zip(self.keys, self.values, strict=True)
        return [(keys[:, :, slots].clone(), values[:, :, slots].clone()) for keys, values in pairs]

    def copy_in(self, slots: Int[Tensor, "n"], kept: list[tuple[Tensor, Tensor]]) -> None:
        """Puts what `copy_out` returned into slots, in the same order."""
        for layer, (keys, values) in enumerate(kept):
            self.keys[layer].index_copy_(2, slots, keys)
            self.values[layer].index_copy_(2, slots, values)


def head_dim(config: Any) -> int:
    """Numbers in one head's key."""
    own = getattr(config, "head_dim", None)
    return int(config.hidden_size // config.num_attention_heads if own is None else own)


def pool_too_large(config: Any, num_slots: int, dtype: torch.dtype, device: Any) -> InvalidInput:
    per_slot = config.num_hidden_layers * config.num_key_value_heads * head_dim(config)
    size = 2 * num_slots * per_slot * dtype.itemsize
    return InvalidInput(
        f"a pool of {num_slots} slots takes {size / 2**30:.1f} GiB of KV, which do not fit on "
        f"{device}; ask for fewer pool slots"
    )
