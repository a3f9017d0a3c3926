"""Reference engine: PyTorch over a Hugging Face causal LM, CPU or GPU.

All rows of all threads are one batch-1 sequence with explicit positions and a rows x slots mask per
layer type, over a zero-filled cache of the whole pool. A windowed layer attends iff visible and its
window allows it. Masks are boolean for SDPA, additive where eager attention is the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stretto.engines import mass, reindexed
from stretto.engines.base import Extra
from stretto.engines.pool_cache import PoolCache
from stretto.engines.reindexed import Gather
from stretto.errors import ModelUnavailable, Unsupported
from stretto.runtime.views import Run, mask_rows

ATTENTION = {
    "llama": "sdpa",
    "qwen2": "sdpa",
    "qwen3": "sdpa",
    "gemma": "sdpa",
    "gemma2": "eager",  # SDPA cannot soft-cap logits
    "gemma3_text": "sdpa",
}
"""Tested architectures (SmolLM and SmolLM2 are `llama`), and the attention backend of transformers
that is their reference; others are refused by name."""

SUPPORTED_MODEL_TYPES = tuple(ATTENTION)

WITHOUT_LAYER_TYPES = frozenset({"llama", "gemma"})
"""Architectures that read no `layer_types`: all layers are full, and there is one mask."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

REFUSED_ROPE_TYPES = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on all positions of a batch: rows would not be isolated."""


DAMAGED = (
    "the model's logits are not finite: its weights or its config.json are damaged; "
    "copy or download the model again"
)


class HFEngine:
    """The reference engine. `model`: a Hugging Face causal LM in eval mode, on its device.

    Raises `Unsupported` for an architecture, attention backend, layer type or RoPE type that is not
    known to honour explicit masks and positions, and if flipping a mask bit in the layers of one
    type leaves the logits unchanged.
    """

    name = "hf"
    batch_invariant = False
    prefers_low_slots = True

    def __init__(self, model: Any, num_slots: int) -> None:
        config = model.config
        check_supported(config)
        self.model = model
        self.device = model.device
        self.num_slots = num_slots
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.max_positions = config.max_position_embeddings
        self.window = sliding_window(config)
        self._masks_by_type = config.model_type not in WITHOUT_LAYER_TYPES
        self.cache = PoolCache(config, num_slots, model.dtype, model.device)
        self._positions = torch.zeros(num_slots, dtype=torch.long, device=model.device)
        check_canary(self)

    def refusal(self, extra: Extra) -> str | None:
        """Why the engine cannot do `extra`; None if it can."""
        return reindexed.refusal(self.model, self.window) if "positions" in extra else None

    def forward(self, runs: list[Run]) -> Float[Tensor, "logit_rows vocab"]:
        plain = [r for r in runs if not r.view.is_reindexed and r.view.attention is None]
        if len(plain) == len(runs):
            return self._forward_runs(runs)
        found: dict[int, Tensor] = {}
        heard = [r for r in runs if not r.view.is_reindexed and r.view.attention is not None]
        turned = [r for r in runs if r.view.is_reindexed]
        if plain:
            _split(plain, self._forward_runs(plain), found)
        if heard:
            with mass.eager(self.model) as heard_mass:
                _split(heard, self._forward_runs(heard), found)
            heard_mass.hand_over(heard)
        for plan in reindexed.plans(turned):
            _split(plan.runs, self._forward_reindexed(plan), found)
        rows = [found[id(run)] for run in runs if run.num_logits]
        return torch.cat(rows) if rows else torch.empty(0, self.vocab_size)

    def _forward_reindexed(self, plan: reindexed.Plan) -> Float[Tensor, "logit_rows vocab"]:
        runs, seen = plan.runs, self._tensor(plan.seen())
        by = self._tensor(plan.seen_positions()) - self._positions[seen]
        slots, positions = self._tensor([s for r in runs for s in r.slots]), plan.positions()
        self._positions[slots] = self._tensor(positions)
        self.cache.gather = Gather(seen, *reindexed.angles(self.model, by))
        try:
            return self.forward_masked(
                self._tensor([t for r in runs for t in r.tokens]),
                self._tensor(positions),
                slots,
                {"full_attention": plan.mask()[None, None].to(self.device)},
                self._tensor(_kept_rows(runs)),
            )
        finally:
            self.cache.gather = None

    def _forward_runs(self, runs: list[Run]) -> Float[Tensor, "logit_rows vocab"]:
        tokens = self._tensor([t for r in runs for t in r.tokens])
        positions = self._tensor([p for r in runs for p in r.positions])
        slots = self._tensor([s for r in runs for s in r.slots])
        mask = torch.from_numpy(mask_rows(runs, self.num_slots)).to(self.device)
        keep = self._tensor(_kept_rows(runs))
        return self.forward_rows(tokens, positions, slots, mask, keep)

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
        self._positions[slots] = positions
        masks = self._masks(mask, positions)
        return self.forward_masked(tokens, positions, slots, masks, keep)

    @torch.inference_mode()
    def forward_masked(
        self,
        tokens: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        slots: Int[Tensor, "rows"],
        masks: dict[str, Tensor],
        keep: Int[Tensor, "logit_rows"],
    ) -> Float[Tensor, "logit_rows vocab"]:
        """`forward_rows` with the mask of each layer type. The model caps its own logits."""
        self.cache.slots = slots
        self.cache.width = masks["full_attention"].shape[-1]
        logits: Tensor = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=masks if self._masks_by_type else masks["full_attention"],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits[0].float().cpu()

    def copy_out(self, slots: list[int]) -> Any:
        index = self._tensor(slots)
        return self.cache.copy_out(index), self._positions[index].clone()

    def copy_in(self, slots: list[int], kept: Any) -> None:
        index = self._tensor(slots)
        layers, positions = kept
        self.cache.copy_in(index, layers)
        self._positions[index] = positions

    def _tensor(self, values: list[int]) -> Int[Tensor, "n"]:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _masks(
        self, mask: Bool[Tensor, "rows width"], positions: Int[Tensor, "rows"]
    ) -> dict[str, Tensor]:
        """The mask of each layer type, (1, 1, rows, width), as the attention backend wants it.

        Additive: 0 where a row may attend, else the dtype's lowest number. Not -inf: every row sees
        itself, so hidden weights underflow to an exact 0, and nothing can become NaN.
        """
        masks = {"full_attention": mask[None, None]}
        if self.window is not None:
            near = self._positions[None, : mask.shape[1]] > positions[:, None] - self.window
            masks["sliding_attention"] = (mask & near)[None, None]
        if self.model.config._attn_implementation != "eager":
            return masks
        dtype = self.model.dtype
        shown = torch.zeros((), dtype=dtype, device=self.device)
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=self.device)
        return {layer_type: torch.where(seen, shown, hidden) for layer_type, seen in masks.items()}


def _kept_rows(runs: list[Run]) -> list[int]:
    """The rows of a pass whose logits are wanted."""
    keep: list[int] = []
    at = 0
    for run in runs:
        keep += [at + row for row in run.kept]
        at += len(run.tokens)
    return keep


def _split(runs: list[Run], logits: Tensor, found: dict[int, Tensor]) -> None:
    """Notes the logits of each run that wants any."""
    at = 0
    for run in runs:
        if run.num_logits:
            found[id(run)] = logits[at : at + run.num_logits]
            at += run.num_logits


def attention_for(model_type: str) -> str:
    """The `attn_implementation` that a supported architecture must be loaded with."""
    return ATTENTION[model_type]


def layer_types(config: Any) -> set[str]:
    """The kinds of the model's attention layers."""
    if config.model_type in WITHOUT_LAYER_TYPES:
        return {"full_attention"}
    return set(getattr(config, "layer_types", None) or ["full_attention"])


def sliding_window(config: Any) -> int | None:
    """The window of the model's sliding layers; None if it has none."""
    window = getattr(config, "sliding_window", None)
    if window is None or "sliding_attention" not in layer_types(config):
        return None
    return int(window)


def check_supported(config: Any) -> None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise Unsupported(
            f"model type {config.model_type!r} is not tested with engine 'hf'; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    attention = attention_for(config.model_type)
    if config._attn_implementation != attention:
        harm = "cannot soft-cap logits" if attention == "eager" else "may ignore explicit masks"
        raise Unsupported(
            f"attention backend {config._attn_implementation!r} {harm}; "
            f"load the model with attn_implementation={attention!r}"
        )
    _check_layers(config)
    check_rope(config)


def _check_layers(config: Any) -> None:
    kinds = layer_types(config)
    if kinds - LAYER_TYPES:
        raise Unsupported(
            f"attention layers of type {min(kinds - LAYER_TYPES)!r} are not tested; "
            f"supported: {', '.join(sorted(LAYER_TYPES))}"
        )
    if "sliding_attention" in kinds and sliding_window(config) is None:
        raise Unsupported(
            "the model has sliding layers but no window (sliding_window is null in its config); "
            "set its window, or make its layers full_attention"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise Unsupported(
            "the model attends in both directions (use_bidirectional_attention), so it cannot "
            "write token by token; use a causal model"
        )


def check_rope(config: Any) -> None:
    """Raises `Unsupported` for a RoPE type under which rows would not be isolated."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_type = [rope[kind] for kind in sorted(LAYER_TYPES & rope.keys())]  # gemma3_text has two
    for each in by_type or [rope]:
        rope_type = each.get("rope_type", each.get("type", "default"))
        if rope_type in REFUSED_ROPE_TYPES:
            raise Unsupported(
                f"RoPE type {rope_type!r} looks at all positions of a batch, so threads would "
                "disturb one another; use a model with default, linear, yarn or llama3 RoPE"
            )


def check_canary(engine: HFEngine) -> None:
    """Flips one mask bit in the layers of each type: the logits must change, or the backend does
    not honour masks. Both rows have one position, so that no window hides one from the other.

    Logits that are not finite compare as changed, and would be decoded into anything.
    """
    rows = torch.arange(2, device=engine.device)
    place = torch.zeros_like(rows)
    both = engine._masks(torch.tril(torch.ones(2, 2, device=engine.device)).bool(), place)
    alone = engine._masks(torch.eye(2, dtype=torch.bool, device=engine.device), place)
    seen = engine.forward_masked(rows, place, rows, both, rows[1:])
    flipped = {
        kind: engine.forward_masked(rows, place, rows, {**both, kind: alone[kind]}, rows[1:])
        for kind in both.keys() & layer_types(engine.model.config)
    }
    for tensor in (*engine.cache.keys, *engine.cache.values):
        tensor[:, :, :2].zero_()
    if not all(logits.isfinite().all() for logits in (seen, *flipped.values())):
        raise ModelUnavailable(DAMAGED)
    for kind, hidden in flipped.items():
        if torch.equal(seen, hidden):
            raise Unsupported(
                f"the model's {kind} ignores explicit masks: flipping a mask bit left its logits "
                f"unchanged; load it with {attention_for(engine.model.config.model_type)!r} as its "
                "attn_implementation"
            )
