"""Tiny random models of the real architectures, and a check of shapes, shared by the tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from jaxtyping import install_import_hook

SHAPED = ["stretto.engines", "stretto.runtime.request", "stretto.runtime.sampler"]
"""Modules whose calls are checked: types, and shapes in signatures. Not `stretto.masks`, since
FlexAttention counts the parameters of its function."""
install_import_hook(SHAPED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


@cache
def tiny_model(kind: str, **changes: Any) -> Any:
    """A float32 model of `kind` (llama, qwen2, qwen3) with fixed random weights."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    config = config_class(**{**TINY, "head_dim": 8, **changes}, attn_implementation="sdpa")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).eval()


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def any_tiny_model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)
