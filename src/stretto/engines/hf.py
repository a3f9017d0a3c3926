"""Reference engine: PyTorch over a Hugging Face causal LM, CPU or GPU.

All rows of all threads are one batch-1 sequence with explicit positions and a boolean
rows x slots mask per layer type, over a zero-filled cache of the whole pool.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from stretto.errors import InvalidInput, ModelUnavailable, Unsupported
from stretto.runtime.views import Run, mask_rows

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Tested architectures (SmolLM and SmolLM2 are `llama`); others are refused by name."""

REFUSED_ROPE_TYPES = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on all positions of a batch: rows would not be isolated."""


class PoolCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of all slots, zero-filled: a masked NaN would leak through the values.

    `update` writes a pass's rows to `slots` and returns the pool up to `width`.
    """

    keys: list[Float[Tensor, "1 kv_heads slots head_dim"]]
    values: list[Float[Tensor, "1 kv_heads slots head_dim"]]

    def __init__(self, config: Any, num_slots: int, dtype: torch.dtype, device: Any) -> None:
        super().__init__(layers=[])
        heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None)
        if head_dim is None:
            head_dim = config.hidden_size // config.num_attention_heads
        shape = (1, heads, num_slots, head_dim)
        count = range(config.num_hidden_layers)
        try:
            self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in count]
            self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in count]
        except (RuntimeError, TypeError) as error:  # TypeError: a size beyond 64 bits
            size = 2 * len(count) * heads * num_slots * head_dim * dtype.itemsize
            raise InvalidInput(
                f"a pool of {num_slots} slots takes {size / 2**30:.1f} GiB of KV, which do not fit "
                f"on {device}; ask for fewer pool slots"
            ) from error
        self.slots = torch.zeros(0, dtype=torch.long, device=device)
        self.width = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        return keys[:, :, : self.width], values[:, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width


class HFEngine:
    """The reference engine. `model`: a Hugging Face causal LM in eval mode, on its device.

    Raises `Unsupported` for an architecture, attention backend or RoPE type that is not known to
    honour explicit masks and positions, and if flipping a mask bit leaves the logits unchanged.
    """

    name = "hf"
    batch_invariant = False

    def __init__(self, model: Any, num_slots: int) -> None:
        config = model.config
        check_supported(config)
        self.model = model
        self.device = model.device
        self.num_slots = num_slots
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.max_positions = config.max_position_embeddings
        self.window = sliding_window(config)
        self.cache = PoolCache(config, num_slots, model.dtype, model.device)
        self._positions = torch.zeros(num_slots, dtype=torch.long, device=model.device)
        check_canary(self)

    def forward(self, runs: list[Run]) -> Float[Tensor, "logit_rows vocab"]:
        tokens = self._tensor([t for r in runs for t in r.tokens])
        positions = self._tensor([p for r in runs for p in r.positions])
        slots = self._tensor([s for r in runs for s in r.slots])
        mask = torch.from_numpy(mask_rows(runs, self.num_slots)).to(self.device)
        keep: list[int] = []
        at = 0
        for run in runs:
            at += len(run.tokens)
            keep += range(at - run.num_logits, at)
        return self.forward_rows(tokens, positions, slots, mask, self._tensor(keep))

    @torch.inference_mode()
    def forward_rows(
        self,
        tokens: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        slots: Int[Tensor, "rows"],
        mask: Bool[Tensor, "rows width"],
        keep: Int[Tensor, "logit_rows"],
    ) -> Float[Tensor, "logit_rows vocab"]:
        """One pass over explicit rows; `keep` are the rows whose logits are returned."""
        self.cache.slots = slots
        self.cache.width = mask.shape[1]
        self._positions[slots] = positions
        hidden = self.model.base_model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=self._masks(mask, positions),
            cache=self.cache,
            use_cache=True,
        ).last_hidden_state
        logits: Tensor = self.model.get_output_embeddings()(hidden[0, keep])
        return logits.float().cpu()

    def copy_out(self, slots: list[int]) -> Any:
        index = self._tensor(slots)
        pairs = zip(self.cache.keys, self.cache.values, strict=True)
        kept = [(k[:, :, index].clone(), v[:, :, index].clone()) for k, v in pairs]
        return kept, self._positions[index].clone()

    def copy_in(self, slots: list[int], kept: Any) -> None:
        index = self._tensor(slots)
        layers, positions = kept
        for layer, (keys, values) in enumerate(layers):
            self.cache.keys[layer].index_copy_(2, index, keys)
            self.cache.values[layer].index_copy_(2, index, values)
        self._positions[index] = positions

    def _tensor(self, values: list[int]) -> Int[Tensor, "n"]:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _masks(
        self, mask: Bool[Tensor, "rows width"], positions: Int[Tensor, "rows"]
    ) -> Tensor | dict[str, Tensor]:
        """The mask as the model wants it: one, or one per layer type if it has windows."""
        full = mask[None, None]
        if self.window is None:
            return full
        near = self._positions[None, : mask.shape[1]] > positions[:, None] - self.window
        return {"full_attention": full, "sliding_attention": full & near[None, None]}


def sliding_window(config: Any) -> int | None:
    """The window of the model's sliding layers; None if it has none."""
    layer_types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)  # llama has none, whatever its layers say
    return int(window) if window is not None and "sliding_attention" in layer_types else None


def check_supported(config: Any) -> None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise Unsupported(
            f"model type {config.model_type!r} is not tested with engine 'hf'; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if config._attn_implementation != "sdpa":
        raise Unsupported(
            f"attention backend {config._attn_implementation!r} may ignore explicit masks; "
            "load the model with attn_implementation='sdpa'"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type in REFUSED_ROPE_TYPES:
        raise Unsupported(
            f"RoPE type {rope_type!r} looks at all positions of a batch, so threads would "
            "disturb one another; use a model with default, linear, yarn or llama3 RoPE"
        )


def check_canary(engine: HFEngine) -> None:
    """Flips one mask bit: the logits must change, or the backend does not honour masks.

    Logits that are not finite compare as changed, and would be decoded into anything.
    """
    rows = torch.arange(2, device=engine.device)
    both = torch.tensor([[True, False], [True, True]], device=engine.device)
    alone = torch.eye(2, dtype=torch.bool, device=engine.device)
    seen = engine.forward_rows(rows, rows, rows, both, rows[1:])
    hidden = engine.forward_rows(rows, rows, rows, alone, rows[1:])
    for tensor in (*engine.cache.keys, *engine.cache.values):
        tensor[:, :, :2].zero_()
    if not (seen.isfinite().all() and hidden.isfinite().all()):
        raise ModelUnavailable(
            "the model's logits are not finite: its weights or its config.json are damaged; "
            "copy or download the model again"
        )
    if torch.equal(seen, hidden):
        raise Unsupported(
            "the model's attention ignores explicit masks: flipping a mask bit left its logits "
            "unchanged; load it with attn_implementation='sdpa'"
        )
