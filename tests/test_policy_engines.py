"""Policies over real engines: decode equals one masked pass, attention mass, re-indexed keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from orchestras import Recording, largest_gap, model_mask, run_all, scheduler_for
from policies import ALL, BUDGET, PAGE, ask, seen_sets
from torch import Tensor

from stretto.engines.choose import make_engine
from stretto.engines.hf import HFEngine
from stretto.errors import Unsupported
from stretto.masks import flat_positions, flat_tokens
from stretto.methods.evicting import EvictingMethod
from stretto.methods.paged_h2o import PagedH2O
from stretto.methods.streaming_llm import StreamingLLM
from stretto.methods.window import SlidingWindow
from stretto.runtime.request import Request

SLOTS = 256
TOLERANCE = 1e-4
REINDEXED = StreamingLLM(budget=12, reindexed=True)


def decode(engine: Any, requests: list[Request], page_size: int = 1, **options: Any) -> None:
    run_all(scheduler_for(engine, SLOTS // page_size, page_size, **options), requests)


# --- one masked pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("name", ["streaming", "random-pages", "h2o", "window-pages-pinned"])
def test_kept_positions_give_the_logits_of_one_masked_pass(kind: str, name: str) -> None:
    model = tiny_model(kind)
    engine = Recording(HFEngine(model, SLOTS))
    page_size = 4 if name.startswith("window") else 1
    requests = [ask(ALL[name], n, 45, seed=n, pool_page=page_size) for n in (3, 8)]
    decode(engine, requests, page_size)
    for request in requests:
        assert largest_gap(model, request, engine) < TOLERANCE


@pytest.mark.parametrize("num_prompt", [1, PAGE - 1, PAGE, PAGE + 1])
def test_short_prompts_and_prompts_fed_in_several_passes(num_prompt: int) -> None:
    model = tiny_model("llama")
    for method in (ALL["h2o"], ALL["streaming-pages"]):
        engine = Recording(HFEngine(model, SLOTS))
        request = ask(method, num_prompt, 40)
        decode(engine, [request], max_rows=3)
        assert largest_gap(model, request, engine) < TOLERANCE


def test_keys_and_values_never_change_once_they_are_written() -> None:
    for method in (ALL["h2o"], ALL["random"], REINDEXED):
        engine = HFEngine(tiny_model("llama"), SLOTS)
        request = ask(method, 20, 40)
        scheduler = scheduler_for(engine, SLOTS)
        scheduler.submit(request)
        written: dict[tuple[int, int], Tensor] = {}
        num_compared = 0
        while scheduler.step():
            tensors = torch.stack([*engine.cache.keys, *engine.cache.values])
            for handle, slots in request.memory.slots.items():
                for i, slot in enumerate(slots.slots):
                    now = tensors[:, 0, :, slot].clone()
                    before = written.setdefault((handle, i), now)
                    num_compared += before is not now
                    assert torch.equal(before, now)
        assert num_compared > 300


# --- attention mass ------------------------------------------------------------------------------


def direct_mass(model: Any, request: Request) -> Tensor:
    """Rows x keys of one masked pass: eager weights, the mean over layers and heads."""
    trace = request.recorder.freeze()
    usual = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        with torch.inference_mode():
            attentions = model(
                input_ids=flat_tokens(trace)[None],
                position_ids=flat_positions(trace)[None],
                attention_mask=model_mask(model, trace),
                use_cache=False,
                output_attentions=True,
            ).attentions
    finally:
        model.config._attn_implementation = usual
    return torch.stack([a[0].mean(dim=0) for a in attentions]).mean(dim=0)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_the_mass_equals_a_direct_computation(kind: str) -> None:
    """With grouped queries (4 heads on 2), windows and soft caps; 1 a row."""
    model = tiny_model(kind)
    requests = [ask(ALL["h2o"], n, 30, seed=n) for n in (5, 9)]
    views = [request._lanes["main"].view for request in requests]
    decode(HFEngine(model, SLOTS), requests, max_rows=4)
    for request, view in zip(requests, views, strict=True):
        mass = direct_mass(model, request)
        num_fed = len(mass) - 1  # the last token drawn is never fed
        assert torch.allclose(mass.sum(dim=1), torch.ones(len(mass)), atol=1e-5)
        assert sum(view.attention.values()) == pytest.approx(num_fed, abs=1e-3)
        at = 0
        for segment in request.recorder.document_order():
            stop = at + len(segment.tokens)
            expected = float(mass[:num_fed, at:stop].sum())
            assert view.attention.get(segment.handle, 0.0) == pytest.approx(expected, abs=1e-4)
            at = stop


def test_scores_are_of_one_sequence_alone() -> None:
    """Batched or not, H2O keeps the same pages."""
    model = tiny_model("llama")

    def kept(batch: bool) -> list[list[set[int]]]:
        requests = [ask(ALL["h2o"], n, 50, seed=n) for n in (4, 11, 7)]
        requests.append(ask(ALL["window"], 6, 50, seed=1))
        for group in [requests] if batch else [[r] for r in requests]:
            decode(HFEngine(model, SLOTS), group)
        return [seen_sets(r.recorder.freeze()) for r in requests]

    assert kept(batch=True) == kept(batch=False)


def test_attention_is_as_it_was_after_a_pass_that_was_listened_to() -> None:
    model = tiny_model("llama")
    attentions = [layer.self_attn for layer in model.model.layers]
    before = [len(each._forward_hooks) for each in attentions]
    decode(HFEngine(model, SLOTS), [ask(ALL["h2o"], 5, 10)])
    assert model.config._attn_implementation == "sdpa"
    assert [len(each._forward_hooks) for each in attentions] == before


# --- re-indexed positions ------------------------------------------------------------------------


def rotate(model: Any, keys: Tensor, positions: Tensor) -> Tensor:
    """transformers' own rotation of raw keys, (kv_heads, n, head_dim)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = model.model.rotary_emb(keys, positions[None])
    return apply_rotary_pos_emb(keys[None], keys[None], cos, sin)[1][0]


def test_re_indexed_keys_are_the_raw_keys_rotated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    engine = HFEngine(model, SLOTS)
    raw: dict[tuple[int, int], Tensor] = {}
    num_compared = 0

    def update(keys: Tensor, values: Tensor, layer: int, **options: Any) -> Any:
        nonlocal num_compared
        found = type(engine.cache).update(engine.cache, keys, values, layer, **options)
        seen = engine.cache.gather
        for row, slot in enumerate(engine.cache.slots.tolist()):
            raw[layer, slot] = projected[layer][row]
        columns = [*seen.slots.tolist(), *engine.cache.slots.tolist()]
        unturned = torch.stack([raw[layer, slot] for slot in columns], dim=1)
        expected = rotate(model, unturned, torch.arange(len(columns)))
        assert torch.allclose(found[0][0], expected, atol=1e-5)
        num_compared += 1
        return found

    projected: dict[int, Tensor] = {}

    def listen(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            projected[layer] = output[0].view(-1, 2, 8)  # kv heads, numbers in one head

        return hook

    handles = [
        block.self_attn.k_proj.register_forward_hook(listen(k))
        for k, block in enumerate(model.model.layers)
    ]
    monkeypatch.setattr(engine.cache, "update", update)
    try:
        decode(engine, [ask(REINDEXED, 20, 40)])
    finally:
        for handle in handles:
            handle.remove()
    assert num_compared == 2 * 40  # the prompt in one pass, then all drawn tokens but the last


def test_with_one_layer_re_indexed_rows_are_those_of_the_visible_text_alone() -> None:
    """There keys and values are of their tokens alone, so that nothing else is left of what is
    hidden: the row must be that of a plain pass over the tokens it sees, at positions 0, 1, …"""
    model = tiny_model("llama", num_hidden_layers=1)
    engine = Recording(HFEngine(model, SLOTS))
    requests = [ask(REINDEXED, n, 40, seed=n) for n in (1, 9, 20)]
    decode(engine, requests, max_rows=7)
    for request in requests:
        trace = request.recorder.freeze()
        tokens, num_prompt = flat_tokens(trace), request.num_prompt_tokens
        order = [
            (s.handle, i) for s in request.recorder.document_order() for i in range(len(s.tokens))
        ]
        for i, row in enumerate(seen_sets(trace)[:-1]):
            at = num_prompt + i
            with torch.inference_mode():
                logits = model(input_ids=tokens[sorted(row)][None], use_cache=False).logits[0, -1]
            mine = engine.rows[id(request.memory), *order[at]]
            assert float((logits - mine).abs().max()) < TOLERANCE


def test_re_indexed_is_kept_until_something_is_hidden_and_differs_after() -> None:
    model = tiny_model("llama")
    rows = []
    for method in (REINDEXED, replace(REINDEXED, reindexed=False)):
        engine = Recording(HFEngine(model, SLOTS))
        decode(engine, [ask(method, 5, 30)])
        rows.append(list(engine.rows.values()))
    gaps = [float((a - b).abs().max()) for a, b in zip(*rows, strict=True)]
    free = 12 - 5
    assert max(gaps[: free + 1]) < TOLERANCE
    assert min(gaps[free + 2 :]) > TOLERANCE


def test_re_indexed_positions_stay_below_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HFEngine(tiny_model("llama"), SLOTS)
    largest = []
    forward = engine.forward_masked

    def watch(tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        largest.append(int(positions.max()))
        return forward(tokens, positions, *rest)

    monkeypatch.setattr(engine, "forward_masked", watch)
    request = ask(REINDEXED, 5, 60)
    decode(engine, [request])
    assert max(largest) == 12 - 1
    assert request.recorder.threads["main"].next_position == 65


def test_re_indexed_requests_in_a_batch_answer_as_one_by_one() -> None:
    """Beside dense ones and those that are listened to, and with preemptions."""
    model = tiny_model("llama")
    methods = [REINDEXED, None, replace(REINDEXED, pin_prompt=True), ALL["h2o"], REINDEXED]

    def asked() -> list[Request]:
        return [ask(m, 3 + k, 30, seed=k) for k, m in enumerate(methods)]

    together, alone = asked(), asked()
    recording = Recording(HFEngine(model, SLOTS))
    scheduler = scheduler_for(recording, 60)
    run_all(scheduler, together)
    assert scheduler.num_preemptions > 0
    for a, b in zip(together, alone, strict=True):
        single = Recording(HFEngine(model, SLOTS))
        decode(single, [b])
        ours = [row for key, row in recording.rows.items() if key[0] == id(a.memory)]
        gap = max(
            float((x - y).abs().max()) for x, y in zip(ours, single.rows.values(), strict=True)
        )
        assert gap < TOLERANCE


def test_hidden_slots_do_not_matter_to_re_indexed_rows() -> None:
    """Not even NaN: what is hidden is not gathered."""
    model = tiny_model("llama")
    rows = []
    for poison in (False, True):
        engine = Recording(HFEngine(model, SLOTS))
        request = ask(REINDEXED, 5, 30)
        scheduler = scheduler_for(engine, SLOTS)
        scheduler.submit(request)
        while scheduler.step():
            if poison:
                held = {s for slots in request.memory.slots.values() for s in slots.slots}
                dead = sorted(set(range(SLOTS)) - held)
                for tensor in (*engine.cache.keys, *engine.cache.values):
                    tensor[:, :, dead] = float("nan")
        rows.append(torch.stack(list(engine.rows.values())))
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
         "'linear'"),
        ("gemma2", {}, r"sliding layers \(window 6\)"),
        ("gemma3_text", {}, "sliding layers"),
    ],
)  # fmt: skip
def test_other_positions_than_default_rope_are_refused_by_name(
    kind: str, changes: dict[str, Any], word: str
) -> None:
    engine = HFEngine(tiny_model(kind, **_frozen(changes)), SLOTS)
    with pytest.raises(Unsupported, match=word):
        scheduler_for(engine, SLOTS).submit(ask(REINDEXED, 5, 5))


def _frozen(changes: dict[str, Any]) -> dict[str, Any]:
    """`tiny_model` is cached by its arguments, which must be hashable."""

    class Frozen(dict):  # type: ignore[type-arg]
        def __hash__(self) -> int:
            return hash(str(self))

    return {key: Frozen(value) for key, value in changes.items()}


# --- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PagedH2O(budget=64), REINDEXED])
def test_fast_engines_refuse_by_name_and_auto_picks_one_that_can(method: EvictingMethod) -> None:
    import copy

    from stretto.methods import extras

    model = copy.deepcopy(tiny_model("llama", head_dim=32)).to(torch.bfloat16)
    engine = make_engine("auto", model, 64, weights="bfloat16", extras=extras(method))
    assert engine.name == "hf"
    request = ask(method, 4, 6)
    run_all(scheduler_for(engine, 64), [request])
    usual = make_engine("auto", model, 64, weights="bfloat16")
    if usual.name == "fused":
        with pytest.raises(Unsupported, match="engine 'fused' has none; use engine 'hf'"):
            scheduler_for(usual, 64).submit(ask(method, 4, 6))


def test_methods_that_need_no_more_than_logits_ask_for_nothing() -> None:
    from stretto.methods import extras

    assert extras("window,budget=8") == extras("sequential") == ()
    assert extras(SlidingWindow(budget=BUDGET)) == ()
    assert extras("paged_h2o,budget=64") == ("attention mass",)
    assert extras("streaming_llm,budget=64,reindexed") == ("re-indexed positions",)


def test_totals_add_up_over_runs() -> None:
    from stretto.runtime.attention import AttentionTotals

    request = ask(ALL["h2o"], 6, 1)
    scheduler = scheduler_for(HFEngine(tiny_model("llama"), 32), 32)
    scheduler.submit(request)
    totals = AttentionTotals()
    runs = request.feed.allocate(scheduler.pool, 100)
    for run in runs:
        totals.add(run, np.full((len(run.tokens), 6), 1 / 6))
    assert sum(totals.values()) == pytest.approx(6 * (4 + 2) / 6)
