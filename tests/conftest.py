"""Tiny random models of the real architectures, and a check of shapes, shared by the tests."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Generator
from functools import cache
from typing import Any

import pytest
import torch
from jaxtyping import install_import_hook

SHAPED = [
    "stretto.data.annotate",
    "stretto.data.convert",
    "stretto.data.markup",
    "stretto.data.stats",
    "stretto.data.structure",
    "stretto.data.teacher",
    "stretto.engines",
    "stretto.eval.compare",
    "stretto.eval.lcwr",
    "stretto.eval.metrics",
    "stretto.eval.multipart",
    "stretto.eval.statistics",
    "stretto.eval.tasks",
    "stretto.runtime.request",
    "stretto.runtime.sampler",
    "stretto.train.bonbon",
    "stretto.train.noise",
    "stretto.train.planned",
    "stretto.train.prefer",
]
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

GEMMA: dict[str, dict[str, Any]] = {
    "gemma2": {
        "query_pre_attn_scalar": 4,
        "sliding_window": 6,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 4,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 3.0,
    },
}
"""One sliding and one full layer; windows and caps so small that leaving one out shows."""


@cache
def tiny_model(kind: str, **changes: Any) -> Any:
    """A float32 model of `kind`, a model_type, with fixed random weights."""
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GemmaConfig,
        GemmaForCausalLM,
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
        "gemma": (GemmaConfig, GemmaForCausalLM),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
        "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    settings = {**TINY, "head_dim": 8, **GEMMA.get(kind, {}), **changes}
    config = config_class(**settings)
    config._attn_implementation = "eager" if kind == "gemma2" else "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).eval()


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard() -> None:
    """A test run in the background may have inherited an ignored SIGINT, and so would its
    subprocesses."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a command that must succeed: what it takes on an idle machine,
    also when other tests run beside it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def instruction_sets() -> list[str]:
    """Those by which this CPU can run weights of some kind."""
    from stretto.kernels.library import NEEDED, cpu_features

    kinds = {name: of["float32"] for name, of in NEEDED.items()}
    return [name for name, needed in kinds.items() if cpu_features().issuperset(needed)]


@pytest.fixture(scope="module", params=instruction_sets() or ["none"])
def instructions(request: pytest.FixtureRequest) -> Generator[str, None, None]:
    """Every instruction set of the CPU kernels that this CPU has, in turn."""
    from stretto.kernels import library

    library.handle.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "avx2":
            patch.setenv(library.WITHOUT, "avx512f")
        yield request.param
    library.handle.cache_clear()


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def any_tiny_model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """What needs the CPU kernels is skipped on a CPU that cannot run them."""
    from stretto.kernels.library import KernelsUnavailable

    try:
        return (yield)
    except KernelsUnavailable as error:
        if "this CPU has no" not in str(error):
            raise
        pytest.skip(str(error))
