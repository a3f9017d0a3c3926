"""The reference engine: windows, refusals, the canary, and the bits it copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from orchestras import Recording, largest_gap, make_request, run_all, scheduler_for

from stretto.dialects.plain import PlainSession
from stretto.engines import hf
from stretto.engines.hf import HFEngine, check_supported
from stretto.errors import Unsupported
from stretto.models import folder

KINDS = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_models_sliding_window_is_honoured(kind: str) -> None:
    """A plain answer longer than the window equals transformers' own causal pass."""
    model = tiny_model(
        kind,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    )
    engine = Recording(HFEngine(model, 256))
    assert engine.window == 6
    request = make_request(4, PlainSession())
    request.params = type(request.params)(max_tokens=40)
    run_all(scheduler_for(engine, 256), [request])
    (prompt, answer) = request.recorder.freeze().segments
    ids = torch.tensor([[*prompt.tokens, *answer.tokens]])
    with torch.inference_mode():
        reference = model(input_ids=ids, use_cache=False).logits[0]
        unwindowed = tiny_model(kind)(input_ids=ids, use_cache=False).logits[0]
    for (_, handle, index), logits in engine.rows.items():
        at = index + (len(prompt) if handle else 0)
        assert float((reference[at] - logits).abs().max()) < 1e-4
    assert float((reference[-1] - unwindowed[-1]).abs().max()) > 1e-3


def config(**changes: Any) -> SimpleNamespace:
    base = {"model_type": "llama", "_attn_implementation": "sdpa", "rope_parameters": None}
    return SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "gemma3"}, "'gemma3' is not tested"),
        ({"_attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        ({"_attn_implementation": "eager"}, "attn_implementation='sdpa'"),
        ({"model_type": "gemma2"}, "'sdpa' cannot soft-cap .*='eager'"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "no window"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both directions"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic"}}, "dynamic"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "longrope"},
                },
            },
            "longrope",
        ),
    ],
)
def test_what_is_not_known_to_work_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(Unsupported, match=word):
        check_supported(config(**changes))


def test_the_canary_notices_attention_that_ignores_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    cache = HFEngine(model, 16).cache
    assert not any(tensor.any() for tensor in (*cache.keys, *cache.values))

    def deaf(self: HFEngine, mask: torch.Tensor, _: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"full_attention": torch.ones_like(mask)[None, None]}

    monkeypatch.setattr(HFEngine, "_masks", deaf)
    with pytest.raises(Unsupported, match="ignores explicit masks"):
        HFEngine(model, 16)


def test_copies_are_bit_for_bit() -> None:
    engine = HFEngine(tiny_model("llama"), 32)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*engine.cache.keys, *engine.cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    kept = engine.copy_out([3, 5, 9])
    before = [k[:, :, [3, 5, 9]].clone() for k in engine.cache.keys]
    for tensor in (*engine.cache.keys, *engine.cache.values):
        tensor[:, :, [3, 5, 9]] = 0
    engine.copy_in([20, 1, 30], kept)
    after = [k[:, :, [20, 1, 30]] for k in engine.cache.keys]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("count", range(1, 9))
def test_batches_of_every_size_agree_with_the_reference(count: int) -> None:
    model = tiny_model("llama")
    engine = Recording(HFEngine(model, 700))
    requests = [make_request(100 + k, PlainSession()) for k in range(count)]
    for request in requests:
        request.params = type(request.params)(max_tokens=8)
    run_all(scheduler_for(engine, 700), requests)
    assert all(largest_gap(model, r, engine) < 1e-4 for r in requests)


def test_bfloat16_runs() -> None:
    import copy

    model = copy.deepcopy(tiny_model("qwen3")).to(torch.bfloat16)
    engine = HFEngine(model, 128)
    assert engine.cache.keys[0].dtype == torch.bfloat16
    request = make_request(1, PlainSession())
    request.params = type(request.params)(max_tokens=10)
    run_all(scheduler_for(engine, 128), [request])
    assert request.num_drawn == 10


def test_supported_kinds_are_the_tested_ones() -> None:
    assert list(hf.SUPPORTED_MODEL_TYPES) == KINDS
    assert folder.FOLDER_MODEL_TYPES == hf.SUPPORTED_MODEL_TYPES
