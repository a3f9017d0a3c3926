"""What a GRPO run will take: training as `train.estimate` has it, and the drawing of rollouts."""

from __future__ import annotations

from typing import Any

from stretto.train.estimate import H100_FLOPS, UTILISATION, Shape, estimate, measure_flops
from stretto.train.grpo_config import GrpoConfig
from stretto.train.grpo_parts import requests_of
from stretto.train.grpo_policy import pool_slots_for
from stretto.train.lora import Lora

PROMPT_TOKENS = 200
"""Of a problem, where none was read."""

DRAW_UTILISATION = 0.02
"""The share of a device's matrix rate that drawing is taken to reach: each pass reads all weights
for a few rows. Ours is measured on no GPU."""


def estimate_grpo(config: GrpoConfig, new_rows: int = 0) -> dict[str, Any]:
    """Memory, operations and time of a run whose answers all have `max_tokens`: an upper bound.

    With an `architecture` no weights are needed; else the model's own are loaded. Memory is of one
    device; the pool's is for the requests that are under way at once.
    """
    from stretto.engines.choose import check_engine
    from stretto.engines.pool_cache import head_dim

    check_engine(config.engine)
    shape, model = _shape(config)
    answers = config.steps * config.prompts_per_step * config.samples
    per_answer = PROMPT_TOKENS + config.max_tokens
    width = 2 if config.dtype == "bfloat16" else 4
    lora = Lora(config.rank, config.alpha, config.targets) if config.how == "lora" else None
    rate = measure_flops(config.dtype)
    training = estimate(
        shape,
        lora=lora,
        new_rows=new_rows,
        num_tokens=answers * per_answer * config.inner,
        target_share=config.max_tokens / per_answer,
        pack_tokens=max(config.pack_tokens, per_answer),
        weight_bytes=width,
        flops_per_s=rate,
    )
    slots = _pool_slots(config, per_answer)
    heads = model.num_key_value_heads * head_dim(model)
    pool = 2 * slots * shape.num_layers * heads * width
    reference = training.trained_parameters * width if config.beta else 0
    drawn = answers * config.max_tokens
    draw_flops = 2.0 * (shape.body_parameters + shape.table_parameters) * drawn
    draw_h100 = _draw_hours(draw_flops, H100_FLOPS)
    draw_here = _draw_hours(draw_flops, rate / UTILISATION)
    return {
        "model": config.model,
        "how": config.how,
        "steps": config.steps,
        "updates": config.steps * config.inner * config.minibatches,
        "rollouts": answers,
        "drawn_tokens": drawn,
        **training.as_dict(),
        "pool_slots": slots,
        "pool_bytes": pool,
        "reference_bytes": reference,
        "peak_bytes": training.peak_bytes + pool + reference,
        "draw_flops": draw_flops,
        "total_flops": training.total_flops + draw_flops,
        "h100_hours": training.h100_hours + draw_h100,
        "this_machine_hours": (training.this_machine_hours or 0.0) + draw_here,
    }


def _pool_slots(config: GrpoConfig, per_answer: int) -> int:
    if config.pool_slots is not None:
        return config.pool_slots
    requests = min(requests_of(config), config.prompts_per_step * config.samples)
    return pool_slots_for(requests, per_answer)


def _draw_hours(flops: float, flops_per_s: float) -> float:
    """How long drawing takes on a device of this matrix rate."""
    return flops / (flops_per_s * DRAW_UTILISATION) / 3600


def _shape(config: GrpoConfig) -> tuple[Shape, Any]:
    """The shape, and the config of the model that has it."""
    if config.architecture is not None:
        from transformers import AutoConfig

        own = dict(config.architecture)
        shape = Shape.of_config(own)
        return shape, AutoConfig.for_model(own.pop("model_type"), **own)
    from stretto.models import load_hf, resolve

    model, _ = load_hf(resolve(config.model, offline=True).path)
    return Shape.of_model(model), model.config
