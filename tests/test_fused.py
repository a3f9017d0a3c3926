"""Engine `fused`: its specification is `hf`, its bits depend on nothing but what a row sees."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import (
    RandomSession,
    Recording,
    gap_of_a_missed_change,
    largest_gap,
    make_request,
    run_all,
    scheduler_for,
)
from test_kernels import kernels_for

from stretto.dialects.plain import PlainSession
from stretto.engines import fused
from stretto.engines.fused import FusedEngine
from stretto.engines.hf import HFEngine
from stretto.errors import InvalidInput, ModelUnavailable, Unsupported
from stretto.runtime.memory import RequestMemory
from stretto.runtime.pool import SlotList
from stretto.runtime.views import Cursor, ListCursor, Run, View

pytestmark = [kernels_for("float32"), pytest.mark.usefixtures("instructions")]
KINDS = ["llama", "qwen2", "qwen3"]
NUM_SLOTS = 512
TOLERANCE = 1e-4
seeds = st.integers(0, 10**6)


def model_of(kind: str = "llama", **changes: Any) -> Any:
    return tiny_model(kind, head_dim=16, **changes)


def engine_of(
    kind: str = "llama", weights: str = "float32", num_slots: int = NUM_SLOTS
) -> FusedEngine:
    kernels_for(weights, skip=True)
    return FusedEngine(model_of(kind), num_slots, weights=weights)


def fill(engine: FusedEngine, value: float) -> None:
    """Every slot gets this: what is hidden or free is not even read."""
    engine.keys.fill_(value)
    engine.values.fill_(value)


class Lists:
    """A pass over explicit rows: (token, position, slot, the slots that the row sees)."""

    def __init__(self, rows: list[tuple[int, int, int, list[int]]]) -> None:
        self.rows = rows

    def run(self, engine: FusedEngine) -> torch.Tensor:
        lists = [np.array(row[3], dtype=np.int32) for row in self.rows]
        views = np.array([[a.ctypes.data, len(a)] for a in lists], dtype=np.int64)
        columns = [np.array([row[i] for row in self.rows], dtype=np.int64) for i in range(3)]
        return engine._pass(*columns, views, np.arange(len(self.rows)))


def whole(request: Any, slots: list[int]) -> tuple[Lists, dict[tuple[int, int], int]]:
    """A whole trace as one pass, tokens in the given slots; and which row is which token."""
    segments = list(request.recorder.document_order())
    place, at = {}, 0
    for segment in segments:
        place[segment.handle] = slots[at : at + len(segment.tokens)]
        at += len(segment.tokens)
    rows, index = [], {}
    for segment in segments:
        seen = [h for h in sorted(place) if segment.sees >> h & 1]
        before = [slot for handle in seen for slot in place[handle]]
        own = place[segment.handle]
        for i, token in enumerate(segment.tokens):
            index[segment.handle, i] = len(rows)
            rows.append((token, segment.positions[i], own[i], [*before, *own[: i + 1]]))
    return Lists(rows), index


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=seeds, page_size=st.sampled_from([1, 4, 16]))
def test_float32_equals_the_reference_over_random_traces(
    kind: str, seed: int, page_size: int
) -> None:
    model = model_of(kind)
    plain = FusedEngine(model, NUM_SLOTS)
    fill(plain, float("nan"))
    engine = Recording(plain)
    num_pages = NUM_SLOTS // page_size
    order = random.Random(seed).sample(range(num_pages), num_pages)
    requests = [make_request(seed + k) for k in range(3)]
    run_all(scheduler_for(engine, num_pages, page_size, order=order), requests)
    for request in requests:
        assert largest_gap(model, request, engine) < TOLERANCE


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_bits_are_those_of_one_pass_in_other_slots(weights: str, seed: int) -> None:
    """Master property, bit for bit: stepwise, beside other requests, preempted, in shuffled and
    poisoned slots, against one pass over the whole trace in slots of its own."""
    engine = engine_of(weights=weights)
    fill(engine, float("nan"))
    recording = Recording(engine)
    order = random.Random(seed).sample(range(160), 160)
    requests = [make_request(seed + k) for k in range(4)]
    run_all(scheduler_for(recording, 160, order=order), requests)
    for request in requests:
        fill(engine, float("nan"))
        size = sum(len(s.tokens) for s in request.recorder.document_order())
        lists, index = whole(request, random.Random(seed + 1).sample(range(NUM_SLOTS), size))
        logits = lists.run(engine)
        mine = {k[1:]: v for k, v in recording.rows.items() if k[0] == id(request.memory)}
        assert mine
        for key, row in mine.items():
            assert torch.equal(row, logits[index[key]])


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_bits_do_not_depend_on_the_number_of_threads_or_of_rows(weights: str) -> None:
    engine = engine_of(weights=weights)
    rng = random.Random(0)
    slots = rng.sample(range(NUM_SLOTS), 100)
    rows = [(rng.randrange(90), i, slots[i], slots[: i + 1]) for i in range(100)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(Lists(rows).run(engine))
    finally:
        torch.set_num_threads(before)
    for size in (1, 3, 13, 33):
        parts = [Lists(rows[i : i + size]).run(engine) for i in range(0, 100, size)]
        results.append(torch.cat(parts))
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 255, 256, 257, 511, 512, 700])
def test_lists_of_every_length_equal_the_reference(length: int) -> None:
    """Blocks of 16 and chunks of 256 begin and end anywhere."""
    model = model_of("qwen3", max_position_embeddings=1024)
    engine = FusedEngine(model, 1024)
    rng = random.Random(length)
    ids = [rng.randrange(90) for _ in range(length)]
    slots = rng.sample(range(1024), length)
    rows = [(ids[i], i, slots[i], slots[: i + 1]) for i in range(length)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    assert float((Lists(rows).run(engine) - expected).abs().max()) < TOLERANCE


def test_rows_that_share_a_part_of_their_lists_equal_rows_alone() -> None:
    engine = engine_of(weights="float32", num_slots=1024)
    rng = random.Random(1)
    shared = rng.sample(range(700), 300)
    for i, slot in enumerate(shared):
        Lists([(rng.randrange(90), i, slot, shared[: i + 1])]).run(engine)
    rows = []
    for k in range(40):
        keep = sorted(rng.sample(range(300), 300 - 10 * (k % 4)))
        rows.append((k, 300, 700 + k, [*(shared[i] for i in keep), 700 + k]))
    alone = torch.cat([Lists([row]).run(engine) for row in rows])
    assert torch.equal(Lists(rows).run(engine), alone)


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_lists_hold_what_the_masks_show_in_trace_order(seed: int) -> None:
    """The list of slots is the reference's bitmap, ordered by segment."""

    class Both:
        def __init__(self, engine: FusedEngine) -> None:
            self.engine = engine
            self.cursors: dict[int, Cursor] = {}
            self.views: list[View] = []  # kept alive, so that no two have the same id

        def __getattr__(self, name: str) -> object:
            return getattr(self.engine, name)

        def forward(self, runs: list[Run]) -> torch.Tensor:
            logits = self.engine.forward(runs)
            self.views += [run.view for run in runs]
            seen: list[tuple[list[int], list[int]]] = []
            for run in runs:
                key = id(run.view)
                cursor = self.cursors.get(key)
                if cursor is None or cursor.epoch != run.view.memory.epoch:
                    bitmap = np.zeros(NUM_SLOTS, dtype=np.bool_)
                    cursor = self.cursors[key] = Cursor(bitmap, run.view.memory.epoch)
                cursor.advance(run.view, run.version, run.segment.handle, run.start)
                cursor.extend(run.slots)
                seen.append((list(np.flatnonzero(cursor.bitmap)), run.slots))
            for run, (slots, own) in zip(runs, seen, strict=True):
                mine = run.view.cursor
                if run is [r for r in runs if r.view is run.view][-1]:
                    listed = mine.slots[: mine.length].tolist()
                    assert sorted(listed) == slots
                    assert listed[len(listed) - len(own) :] == own
                    handles = {s: h for h, m in run.view.memory.slots.items() for s in m.slots}
                    order = [handles[s] for s in listed if handles[s] != run.segment.handle]
                    assert order == sorted(order)
            return logits

    engine = Both(engine_of())
    requests = [make_request(seed + k) for k in range(3)]
    run_all(scheduler_for(engine, 170), requests)


def test_an_evicted_slot_is_not_read() -> None:
    """A row that has evicted a segment gives the same bits when that segment's slots hold NaN."""
    engine = engine_of()
    rows = [(5, i, i, list(range(i + 1))) for i in range(8)]
    Lists(rows).run(engine)
    last = Lists([(6, 8, 8, [0, 1, 6, 7, 8])])
    before = last.run(engine)
    for tensor in (engine.keys, engine.values):
        tensor[:, :, 2:6] = float("nan")
    assert torch.equal(last.run(engine), before)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_nearer_to_float32_than_torchs(kind: str) -> None:
    import copy

    exact = model_of(kind, num_hidden_layers=4)
    half = copy.deepcopy(exact).to(torch.bfloat16)
    rounded = copy.deepcopy(half).float()  # the same weights, computed in float32
    kernels_for("bfloat16", skip=True)
    engine = FusedEngine(half, 128)
    assert engine.keys.dtype == torch.bfloat16
    rng = random.Random(0)
    ids = [rng.randrange(90) for _ in range(100)]
    with torch.inference_mode():
        reference = rounded(torch.tensor([ids])).logits[0]
        torchs = half(torch.tensor([ids])).logits[0].float()
    mine = Lists([(ids[i], i, i, list(range(i + 1))) for i in range(100)]).run(engine)
    error = float((mine - reference).square().mean().sqrt())
    assert error < float((torchs - reference).square().mean().sqrt())


def test_int8_stays_near_float32() -> None:
    kernels_for("int8", skip=True)
    model = model_of("llama")
    ids = [random.Random(0).randrange(90) for _ in range(100)]
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0]
    engine = FusedEngine(model, 128, weights="int8")
    mine = Lists([(ids[i], i, i, list(range(i + 1))) for i in range(100)]).run(engine)
    assert float((mine - reference).std() / reference.std()) < 0.05
    assert engine.weight_bytes < 0.4 * FusedEngine(model, 128).weight_bytes


def test_int8_without_bfloat16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention has two forms, which round queries differently; both hold to each other."""
    kernels = fused.library.load("int8")
    if kernels.instructions != "avx512" or "bfloat16" not in kernels.weights:
        pytest.skip("int8 weights run without bfloat16 instructions here")
    rows = [(i % 90, i, i, list(range(i + 1))) for i in range(60)]
    both = Lists(rows).run(engine_of(weights="int8"))
    monkeypatch.setenv("STRETTO_CPU_WITHOUT", "avx512_bf16")
    alone = Lists(rows).run(engine_of(weights="int8"))
    assert not torch.equal(both, alone)
    assert float((both - alone).std() / both.std()) < 0.05


def test_sibling_perturbation_is_bit_identical() -> None:
    """What one thread writes changes no bit of its siblings."""
    rows = []
    for changed in (False, True):
        engine = engine_of()
        prompt = list(range(10))
        Lists([(7, i, i, prompt[: i + 1]) for i in prompt]).run(engine)
        threads = [(3, 10, 20, [*prompt, 20]), (4, 10, 21, [*prompt, 21])]
        if changed:
            threads[1] = (55, 10, 21, [*prompt, 21])
        rows.append(Lists(threads).run(engine)[0])
    assert torch.equal(*rows)


def test_copies_are_bit_for_bit() -> None:
    engine = engine_of()
    generator = torch.Generator().manual_seed(0)
    for tensor in (engine.keys, engine.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    kept = engine.copy_out([3, 5, 9])
    before = engine.keys[:, :, [3, 5, 9]].clone()
    engine.keys[:, :, [3, 5, 9]] = 0
    engine.copy_in([20, 1, 30], kept)
    assert torch.equal(engine.keys[:, :, [20, 1, 30]], before)


def test_answers_are_those_of_the_reference() -> None:
    model = model_of("qwen2")
    answers = []
    for engine in (HFEngine(model, 256), FusedEngine(model, 256)):
        request = make_request(1, PlainSession(), script=None)
        request.params = type(request.params)(max_tokens=60)
        run_all(scheduler_for(engine, 256), [request])
        answers.append([t for s in request.recorder.freeze().response for t in s.tokens])
    assert answers[0] == answers[1]


def test_a_model_used_up_gives_the_same_bits() -> None:
    import copy

    rows = [(5, i, i, list(range(i + 1))) for i in range(8)]
    model = copy.deepcopy(model_of("qwen2"))
    expected = Lists(rows).run(FusedEngine(model, 64))
    engine = FusedEngine(model, 64, consume=True)
    assert model.base_model.layers[0].mlp.up_proj.weight.numel() == 0
    del model
    assert torch.equal(Lists(rows).run(engine), expected)


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("llama", {"head_dim": 8}, "head dimension of 8"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"intermediate_size": 40}, "intermediate size of 40"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, "6"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(
    kind: str, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(Unsupported, match=word):
        FusedEngine(tiny_model(kind, **{"head_dim": 16, **changes}), 64)


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial rotary"),
    ],
)
def test_rotary_embeddings_that_it_does_not_have(rope: dict[str, Any], word: str) -> None:
    import copy

    model = copy.deepcopy(model_of())
    model.config.rope_parameters = rope
    with pytest.raises(Unsupported, match=word):
        FusedEngine(model, 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["norm", "input_layernorm", "v_proj", "gate_proj", "down_proj"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_damaged_weights_are_refused(weights: str, where: str, value: float) -> None:
    import copy

    kernels_for(weights, skip=True)
    model = copy.deepcopy(model_of())
    for name, parameter in model.named_parameters():
        if where in name.split("."):
            parameter.data.view(-1)[3:40:7] = value
    with pytest.raises(ModelUnavailable, match="not finite"):
        FusedEngine(model, 64, weights=weights)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_later_changes_of_the_model_change_nothing(weights: str) -> None:
    import copy

    kernels_for(weights, skip=True)
    model = copy.deepcopy(model_of("qwen3"))
    engine = FusedEngine(model, 64, weights=weights)
    rows = [(5, i, i, list(range(i + 1))) for i in range(8)]
    before = Lists(rows).run(engine)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    assert torch.equal(Lists(rows).run(engine), before)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("dim", [16, 48, 80, 112, 256])
def test_head_dimensions(dim: int, weights: str) -> None:
    """The last slot of the pool included, with nothing readable behind it."""
    kernels_for(weights, skip=True)
    model = tiny_model("llama", head_dim=dim)
    slots = 2**20 // dim // 4  # two layers of two heads fill their pages to the last byte
    engine = FusedEngine(model, slots, weights=weights)
    last = list(range(slots - 40, slots))
    rows = [(i, i, last[i], last[: i + 1]) for i in range(40)]
    with torch.inference_mode():
        expected = model(torch.arange(40)[None]).logits[0]
    mine = Lists(rows).run(engine)
    assert float((mine - expected).std() / expected.std()) < 0.05


class OwnLinear(torch.nn.Linear):
    """Stands for an adapter or a quantised layer."""


def test_what_computes_in_its_own_way_is_refused() -> None:
    import copy

    model = copy.deepcopy(model_of())
    mlp = model.model.layers[1].mlp
    mlp.up_proj = OwnLinear(32, 64, bias=False)
    with pytest.raises(Unsupported, match=r"up_proj is a .*OwnLinear"):
        FusedEngine(model, 64)
    model = copy.deepcopy(model_of())
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match=r"layers\.0 has a hook"):
        FusedEngine(model, 64)


def pruned(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def wider_head(model: Any) -> None:
    model.lm_head = torch.nn.Linear(32, 5000, bias=False)


def wider_config(model: Any) -> None:
    model.config.intermediate_size = 128


def lopsided_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(32, 32, bias=True)


@pytest.mark.parametrize("change", [pruned, wider_head, wider_config, lopsided_bias])
def test_weights_that_the_config_does_not_describe_are_refused(change: Any) -> None:
    import copy

    model = copy.deepcopy(model_of())
    change(model)
    with pytest.raises(Unsupported):
        FusedEngine(model, 64)


def test_a_pool_takes_memory_as_it_is_written_to() -> None:
    """The canary writes two slots of each row: a small page of each, not a huge one."""
    engine = engine_of(num_slots=2**18)
    for tensor in (engine.keys, engine.values):
        assert resident_bytes(tensor) < 2**20 < tensor.nbytes / 32


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the mapping that a tensor begins."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("no /proc/self/smaps")
    text = maps.read_text(encoding="utf-8")
    for found in re.finditer(
        r"^([0-9a-f]+)-([0-9a-f]+) .*\n(?:(?![0-9a-f]+-).*\n)*?Rss: +(\d+) kB", text, re.M
    ):
        if int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16):
            return 1024 * int(found[3])
    raise AssertionError("no mapping of that address")


@pytest.mark.parametrize("slots", [-5, 0, 1])
def test_a_pool_too_small_for_the_canary_is_refused(slots: int) -> None:
    with pytest.raises(InvalidInput, match="num_slots"):
        FusedEngine(model_of(), slots)


@pytest.mark.parametrize("token", [-1, 96, 10**9])
def test_a_token_that_the_model_does_not_have_is_refused(token: int) -> None:
    request = make_request(1, PlainSession())
    request.recorder.segments[0].tokens[0] = token
    with pytest.raises(InvalidInput, match="the model has 96"):
        run_all(scheduler_for(engine_of(), NUM_SLOTS), [request])


def test_the_property_can_fail() -> None:
    """A view that misses one change is noticed."""
    model = model_of()
    gap = gap_of_a_missed_change(model, FusedEngine(model, NUM_SLOTS), NUM_SLOTS)
    assert gap > TOLERANCE


@pytest.mark.parametrize("max_rows", [3, 512])
@settings(max_examples=15, deadline=None)
@given(seed=seeds)
def test_lists_live_until_their_pass_has_run(max_rows: int, seed: int) -> None:
    """Several runs of one view in a pass, with changes and growth between: each list stays."""
    model = model_of()
    plain = FusedEngine(model, NUM_SLOTS)

    class Checked:
        def __getattr__(self, name: str) -> object:
            return getattr(plain, name)

        def forward(self, runs: list[Run]) -> torch.Tensor:
            def checked(*arrays: Any) -> torch.Tensor:
                handed = [a for run in runs for a in run.view.cursor.handed]
                alive = {a.ctypes.data for a in handed}
                assert set(arrays[3][:, 0].tolist()) <= alive
                return FusedEngine._pass(plain, *arrays)

            plain._pass = checked  # type: ignore[method-assign]
            logits = plain.forward(runs)
            assert not any(run.view.cursor.handed for run in runs)
            return logits

    engine = Recording(Checked())
    session = RandomSession(seed, rates={"fork": 0.4, "join": 0.5, "evict": 0.6, "cut": 0.6})
    request = make_request(seed, session)
    run_all(scheduler_for(engine, NUM_SLOTS, max_rows=max_rows), [request])
    assert largest_gap(model, request, engine) < TOLERANCE


def test_a_list_that_grows_or_changes_leaves_the_handed_one_alone() -> None:
    cursor = ListCursor(0)
    cursor.extend(list(range(200)))
    cursor.hand_out()
    (first,) = cursor.handed
    cursor.extend(list(range(100)))  # beyond its 256 places
    cursor.hand_out()
    assert [len(cursor.handed), first[:200].tolist()] == [2, list(range(200))]
    memory = RequestMemory()
    memory.slots = {0: SlotList(), 1: SlotList()}
    memory.slots[1].slots = [7, 8]
    second = cursor.slots
    cursor._rewrite(memory, [1], 0, 0)
    assert second[:2].tolist() == [0, 1]
    assert cursor.slots[: cursor.length].tolist() == [7, 8]
    cursor.take_back()
    assert cursor.handed == []
