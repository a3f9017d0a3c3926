"""Engine `flex` against its specification: the masked pass, `hf`, and masks made from scratch."""

from __future__ import annotations

import copy
import random
import shutil
from typing import Any

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import (
    RandomSession,
    Recording,
    largest_gap,
    make_request,
    run_all,
    scheduler_for,
)
from plans import Snapshots, planned, worst_gap
from test_master import fill_with_garbage
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from stretto.dialects.plain import PlainSession
from stretto.engines.base import Engine
from stretto.engines.blocks import TILE_ROWS, Tables
from stretto.engines.flex import FlexEngine, check_sizes, check_supported
from stretto.engines.hf import HFEngine
from stretto.errors import InvalidInput, ModelUnavailable, Unsupported
from stretto.runtime.request import Request
from stretto.runtime.views import Cursor, Run, View, mask_rows

TOLERANCE = 1e-4
KINDS = ["llama", "qwen2", "qwen3"]
NUM_SLOTS = 512
BLOCK = 8
seeds = st.integers(0, 10**6)


def flex(kind: str = "llama", num_slots: int = NUM_SLOTS, **options: Any) -> FlexEngine:
    size = options.pop("block_size", BLOCK)
    return FlexEngine(tiny_model(kind), num_slots, size, block_size=size, **options)


def plain_request(seed: int, max_tokens: int) -> Request:
    request = make_request(seed, PlainSession())
    request.params = type(request.params)(max_tokens=max_tokens)
    return request


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(seed=seeds, page_size=st.sampled_from([BLOCK, 2 * BLOCK]))
def test_stepwise_logits_equal_one_masked_pass(kind: str, seed: int, page_size: int) -> None:
    """Shuffled pages, garbage in every slot, and other requests in the batch."""
    engine = flex(kind)
    fill_with_garbage(engine, seed)
    recording = Recording(engine)
    num_pages = NUM_SLOTS // page_size
    order = random.Random(seed).sample(range(num_pages), num_pages)
    requests = [make_request(seed + k) for k in range(3)]
    run_all(scheduler_for(recording, num_pages, page_size, order=order), requests)
    for request in requests:
        assert largest_gap(tiny_model(kind), request, recording) < TOLERANCE


def test_preempted_requests_come_back() -> None:
    recording = Recording(flex())
    requests = [make_request(k) for k in range(6)]
    scheduler = scheduler_for(recording, 28, BLOCK)
    run_all(scheduler, requests)
    assert scheduler.num_preemptions
    assert all(r.finish_reason == "stop" for r in requests)
    assert all(largest_gap(tiny_model("llama"), r, recording) < TOLERANCE for r in requests)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_with_hf(kind: str) -> None:
    """Row by row on the same requests, in float32, to 1e-4; also with a prompt of several tiles."""
    rows = []
    for engine in (HFEngine(tiny_model(kind), 2048), flex(kind, 2048)):
        recording = Recording(engine)
        requests = [make_request(k) for k in range(3)]
        requests.append(long_request(300))
        run_all(scheduler_for(recording, 2048 // BLOCK, BLOCK), requests)
        names = {id(r.memory): k for k, r in enumerate(requests)}
        rows.append({(names[m], *at): row for (m, *at), row in recording.rows.items()})
    assert rows[0].keys() == rows[1].keys()
    assert max(float((rows[0][k] - rows[1][k]).abs().max()) for k in rows[0]) < TOLERANCE


def long_request(length: int) -> Request:
    rng = random.Random(length)
    return Request(
        [rng.randrange(90) for _ in range(length)],
        PlainSession(),
        type(plain_request(0, 5).params)(max_tokens=5),
        decode=lambda ids: " ".join(map(str, ids)),
        end_ids=frozenset(),
        max_positions=512,
        script=lambda thread, index: index,
    )


class Checked(Recording):
    """Compares what FlexAttention would read with `mask_rows`, pass by pass."""

    num_compared = 0

    def __init__(self, engine: FlexEngine) -> None:
        super().__init__(engine)
        self.plain: dict[int, tuple[View, Cursor | None]] = {}

    def forward(self, runs: list[Run]) -> torch.Tensor:
        expected = torch.from_numpy(self._mask_rows(runs))
        logits = super().forward(runs)
        self._compare(runs, expected)
        return logits

    def _mask_rows(self, runs: list[Run]) -> Any:
        """The plain mask, along cursors of its own."""
        views = {id(run.view): run.view for run in runs}
        kept = {key: view.cursor for key, view in views.items()}
        for key, view in views.items():
            view.cursor = self.plain.get(key, (view, None))[1]
        mask = mask_rows(runs, self.engine.num_slots)
        for key, view in views.items():
            self.plain[key] = view, view.cursor
            view.cursor = kept[key]
        return mask

    def _compare(self, runs: list[Run], expected: torch.Tensor) -> None:
        tables = self.engine.tables
        tile_rows = 1 if all(len(run.tokens) == 1 for run in runs) else TILE_ROWS
        width = self.engine.num_slots + self.engine.block_size
        tiles, at = [], 0
        for run in runs:
            for first in range(0, len(run.tokens), tile_rows):
                count = min(tile_rows, len(run.tokens) - first)
                tile = torch.zeros(tile_rows, width, dtype=torch.bool)
                tile[:count, : expected.shape[1]] = expected[at : at + count]
                tile[count:] = tile[count - 1]
                tiles.append(tile)
                at += count
        wanted, n = torch.stack(tiles), len(tiles)
        seen = create_mask(tables.mask_mod, n, 1, tile_rows, width, "cpu")[:, 0]
        assert torch.equal(seen, wanted)
        scratch = create_block_mask(
            lambda tile, head, row, slot: wanted[tile, row, slot],
            n, None, tile_rows, width, "cpu", (TILE_ROWS, self.engine.block_size),
            separate_full_blocks=False,
        )  # fmt: skip
        mine = tables.mask(1 << (n - 1).bit_length(), tile_rows)
        for tile in range(n):
            count = int(scratch.kv_num_blocks[tile, 0, 0])
            assert int(mine.kv_num_blocks[tile, 0, 0]) == count
            blocks = mine.kv_indices[tile, 0, 0, :count].tolist()
            assert sorted(blocks) == sorted(scratch.kv_indices[tile, 0, 0, :count].tolist())
        self.num_compared += n


@settings(max_examples=6, deadline=None)
@given(seed=seeds, num_pages=st.sampled_from([64, 28]))
def test_block_masks_updated_in_place_equal_those_made_from_scratch(
    seed: int, num_pages: int
) -> None:
    """With forks, joins, evictions and preemption; always in the tensors of the beginning."""
    engine = flex()
    before = [t.data_ptr() for t in (engine.tables.kv_indices, engine.tables.listed)]
    checked = Checked(engine)
    order = random.Random(seed).sample(range(num_pages), num_pages)
    rates = {"fork": 0.4, "join": 0.3, "evict": 0.4, "cut": 0.2}
    requests = [make_request(seed + k, RandomSession(seed + k, rates=rates)) for k in range(3)]
    run_all(scheduler_for(checked, num_pages, BLOCK, order=order), requests)
    assert checked.num_compared > 0
    assert before == [t.data_ptr() for t in (engine.tables.kv_indices, engine.tables.listed)]


def test_several_tiles_of_one_run_are_compared_too() -> None:
    checked = Checked(flex())
    run_all(scheduler_for(checked, 64, BLOCK), [long_request(300), plain_request(1, 6)])
    assert checked.num_compared > 3


@pytest.mark.parametrize("length", [5, 300])
def test_a_block_sees_itself_in_both_directions_over_all_its_tiles(length: int) -> None:
    """And while it is written, a dense sibling; once more as it is committed."""
    checked = Checked(flex())
    snapshots = Snapshots(checked)
    request = planned([[length, 3], [2]], variant="dense", steps_ratio=0.01)
    snapshots.request = request
    run_all(scheduler_for(snapshots, 64, BLOCK), [request])
    assert request.finish_reason == "stop"
    assert checked.num_compared > length // TILE_ROWS
    assert worst_gap(tiny_model("llama"), snapshots) < TOLERANCE


def test_a_step_writes_only_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 tokens of one thread are 8 blocks: 8 entries are written, not a list per token."""
    engine = flex()
    written: list[int] = []
    upload = Tables.upload

    def counting(self: Tables, num_tiles: int, tile_rows: int) -> None:
        written.append(len(self._indices))
        upload(self, num_tiles, tile_rows)

    monkeypatch.setattr(Tables, "upload", counting)
    request = plain_request(1, 60)
    run_all(scheduler_for(engine, 64, BLOCK), [request])
    assert len(written) == 60
    prompt, answer = request.recorder.freeze().segments
    num_blocks = -(-(len(answer) - 1) // BLOCK)  # its last token is drawn and never fed
    assert sum(written) == -(-len(prompt) // BLOCK) + num_blocks
    assert sum(n > 0 for n in written) == 1 + num_blocks


def test_a_table_that_is_too_small_grows() -> None:
    engine = flex()
    engine.tables = Tables(2, NUM_SLOTS // BLOCK + 1, BLOCK, "cpu")
    recording = Recording(engine)
    requests = [plain_request(k, 3 + k) for k in range(5)]
    run_all(scheduler_for(recording, 64, BLOCK), requests)
    assert engine.tables.num_tiles == 8
    assert all(largest_gap(tiny_model("llama"), r, recording) < TOLERANCE for r in requests)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports inductor
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_on_cpu_the_lists_alone_say_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, FlexAttention reads all slots and only masks; compiled, it reads listed blocks.
    So here every block passes the mask, and what is not listed must still not be read."""
    upload = Tables.upload

    def unmasked(self: Tables, num_tiles: int, tile_rows: int) -> None:
        upload(self, num_tiles, tile_rows)
        self.listed[:] = True

    engine = flex(block_size=16, compiled=True)
    monkeypatch.setattr(Tables, "upload", unmasked)
    recording = Recording(engine)
    requests = [plain_request(k, 20) for k in range(2)]
    run_all(scheduler_for(recording, 32, 16), requests)
    assert all(largest_gap(tiny_model("llama"), r, recording) < TOLERANCE for r in requests)


def test_pages_that_do_not_fit_the_blocks_are_refused_and_the_next_pass_is_right() -> None:
    engine = flex()
    with pytest.raises(Unsupported, match=f"blocks of {BLOCK} slots, but a segment .* multiple"):
        run_all(scheduler_for(engine, NUM_SLOTS), [plain_request(k, 9) for k in range(3)])
    for page_size in (1, BLOCK // 2):
        order = random.Random(0).sample(range(64), 64)
        with pytest.raises(Unsupported, match="a segment starts or breaks within one"):
            run_all(scheduler_for(engine, 64, page_size, order=order), [plain_request(0, 20)])
    recording = Recording(engine)
    requests = [make_request(k) for k in range(2)]
    run_all(scheduler_for(recording, 64, BLOCK), requests)
    assert all(largest_gap(tiny_model("llama"), r, recording) < TOLERANCE for r in requests)


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("gemma2", {}, "'gemma2' is not tested with engine 'flex'.*engine 'hf'"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, "6"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_that_it_does_not_run_are_refused(
    kind: str, changes: dict[str, Any], word: str
) -> None:
    config = copy.deepcopy(tiny_model(kind).config)
    if "sliding_window" in changes:
        config = tiny_model(kind, **changes).config
    else:
        config.update(changes)
    with pytest.raises(Unsupported, match=word):
        check_supported(config)


def test_pages_and_blocks_that_do_not_fit_one_another_or_the_kernels_are_refused() -> None:
    model = tiny_model("llama")
    told = r"blocks of 128 slots, but the page size is 1; set the page size to 128 or a multiple"
    with pytest.raises(Unsupported, match=told):
        FlexEngine(model, 512, page_size=1)
    with pytest.raises(InvalidInput, match=r"block of 64 slots .* take 128 or a multiple"):
        check_sizes(64, 64, "cuda")
    with pytest.raises(InvalidInput, match="block of 0 slots"):
        check_sizes(64, 0, "cpu")
    check_sizes(256, 128, "cuda")


def test_a_pool_that_is_not_whole_blocks_leaves_the_rest_unused() -> None:
    recording = Recording(FlexEngine(tiny_model("llama"), 60, BLOCK, block_size=BLOCK))
    request = plain_request(1, 12)
    run_all(scheduler_for(recording, 60 // BLOCK, BLOCK), [request])
    assert largest_gap(tiny_model("llama"), request, recording) < TOLERANCE


def test_a_model_whose_logits_are_not_finite_is_refused() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ModelUnavailable, match="not finite"):
        FlexEngine(model, 64, BLOCK, block_size=BLOCK)


def test_the_canary_notices_attention_that_ignores_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(q: Any, k: Any, v: Any, *, scale: float, **_: Any) -> torch.Tensor:
        k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=True
        )

    monkeypatch.setattr("stretto.engines.flex._uncompiled", deaf)
    with pytest.raises(Unsupported, match="ignores block masks"):
        flex()


def test_copies_are_bit_for_bit_and_bfloat16_runs() -> None:
    model = copy.deepcopy(tiny_model("qwen3")).to(torch.bfloat16)
    engine = FlexEngine(model, 64, BLOCK, block_size=BLOCK)
    assert isinstance(engine, Engine)
    assert engine.cache.keys[0].dtype == torch.bfloat16
    fill_with_garbage(engine, 0)
    kept = engine.copy_out([3, 5, 9])
    before = [k[:, :, [3, 5, 9]].clone() for k in engine.cache.keys]
    engine.copy_in([20, 1, 30], kept)
    after = [k[:, :, [20, 1, 30]] for k in engine.cache.keys]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    request = plain_request(1, 10)
    run_all(scheduler_for(engine, 8, BLOCK), [request])
    assert request.num_drawn == 10
