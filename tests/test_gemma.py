"""Gemma 2 and 3: windowed and full layers in turn, soft caps, two RoPE bases."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from orchestras import Recording, largest_gap, make_request, run_all, scheduler_for
from tiny_lms import tiny_tokenizer

from stretto.dialects.plain import PlainSession
from stretto.engines.hf import HFEngine, attention_for
from stretto.errors import Unsupported
from stretto.models.folder import inspect_folder
from stretto.models.loading import load_hf

KINDS = ["gemma2", "gemma3_text"]
TOLERANCE = 1e-4


def plain_answer(model: Any, num_slots: int = 256) -> tuple[Recording, torch.Tensor]:
    """An answer of 40 tokens: the decoded rows, and the ids of prompt and answer."""
    engine = Recording(HFEngine(model, num_slots))
    request = make_request(4, PlainSession())
    request.params = type(request.params)(max_tokens=40)
    run_all(scheduler_for(engine, num_slots), [request])
    prompt, answer = request.recorder.freeze().segments
    rows = {i + (len(prompt) if h else 0): row for (_, h, i), row in engine.rows.items()}
    engine.rows = rows  # by place in the text
    return engine, torch.tensor([[*prompt.tokens, *answer.tokens]])


def own_pass(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' own causal pass, which makes its own masks."""
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_longer_than_the_window_equals_transformers_own_pass(kind: str) -> None:
    model = tiny_model(kind)
    engine, ids = plain_answer(model)
    reference = own_pass(model, ids)
    assert len(engine.rows) == 40 > engine.window == 6
    for at, row in engine.rows.items():
        assert float((reference[at] - row).abs().max()) < TOLERANCE


def test_gemma_3_as_it_is_five_windowed_layers_to_one_full() -> None:
    model = tiny_model("gemma3_text", sliding_window_pattern=6, num_hidden_layers=7)
    kinds = [kind.removesuffix("_attention") for kind in model.config.layer_types]
    assert kinds == [*["sliding"] * 5, "full", "sliding"]
    bases = {k: v["rope_theta"] for k, v in model.config.rope_parameters.items()}
    assert bases == {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
    engine, ids = plain_answer(model)
    reference = own_pass(model, ids)
    assert max(float((reference[at] - row).abs().max()) for at, row in engine.rows.items()) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {"sliding_window": 512}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"sliding_window": 512}),
        ("gemma3_text", {"final_logit_softcapping": None}),
    ],
)
def test_each_peculiarity_shows_in_these_models(kind: str, changes: dict[str, Any]) -> None:
    """So leaving one out could not pass the tests above: same weights, other logits."""
    ids = torch.arange(40)[None] % 90
    gap = (own_pass(tiny_model(kind), ids) - own_pass(tiny_model(kind, **changes), ids)).abs().max()
    assert float(gap) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_the_master_property_notices_another_window(kind: str) -> None:
    model = tiny_model(kind)
    hf = HFEngine(model, 512)
    hf.window = 7
    engine = Recording(hf)
    request = make_request(3)
    run_all(scheduler_for(engine, 512), [request])
    assert largest_gap(model, request, engine) > TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deaf_layers", ["full_attention", "sliding_attention"])
def test_the_canary_notices_each_type_of_layers(
    kind: str, deaf_layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks_of = HFEngine._masks

    def deaf(self: HFEngine, mask: torch.Tensor, at: torch.Tensor) -> dict[str, torch.Tensor]:
        open_to_all = masks_of(self, torch.ones_like(mask), at)
        return {**masks_of(self, mask, at), deaf_layers: open_to_all[deaf_layers]}

    monkeypatch.setattr(HFEngine, "_masks", deaf)
    with pytest.raises(Unsupported, match=f"{deaf_layers} ignores explicit masks"):
        HFEngine(tiny_model(kind), 16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_one_position_is_no_deafness(kind: str) -> None:
    model = tiny_model(kind, sliding_window=1)
    engine, ids = plain_answer(model)
    reference = own_pass(model, ids)
    assert max(float((reference[at] - row).abs().max()) for at, row in engine.rows.items()) < 1e-4


def test_gemma_2_with_sdpa_is_refused_since_it_cannot_soft_cap() -> None:
    model = copy.deepcopy(tiny_model("gemma2"))
    model.config._attn_implementation = "sdpa"
    with pytest.raises(Unsupported, match=r"'sdpa' cannot soft-cap logits; .*'eager'"):
        HFEngine(model, 16)
    model.config._attn_implementation = attention_for("gemma2")
    HFEngine(model, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_hidden_weighs_exactly_nothing(kind: str, dtype: torch.dtype) -> None:
    """Huge values in hidden slots change no bit, and a row that sees only itself is no NaN."""
    engine = HFEngine(copy.deepcopy(tiny_model(kind)).to(dtype), 8)
    rows = torch.arange(3)
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[rows, rows] = True
    mask[2, 0] = True
    clean = engine.forward_rows(rows, rows, rows, mask, rows)
    for tensor in (*engine.cache.keys, *engine.cache.values):
        tensor[:, :, 3:] = 1e30
    assert torch.equal(engine.forward_rows(rows, rows, rows, mask, rows), clean)
    assert clean.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_is_described_and_loads(kind: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(kind, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    facts = inspect_folder(tmp_path)
    assert (facts.model_type, facts.num_layers, facts.dtype) == (kind, 2, "float32")
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    loaded, _ = load_hf(tmp_path)
    engine, ids = plain_answer(loaded)
    reference = own_pass(model, ids)
    assert max(float((reference[at] - row).abs().max()) for at, row in engine.rows.items()) < 1e-4


def test_gemma_3_with_pictures_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(Unsupported, match=r"'gemma3'; supported: .*, gemma2, gemma3_text$"):
        inspect_folder(tmp_path)
