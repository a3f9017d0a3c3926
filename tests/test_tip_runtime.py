"""Models with registers while they run: the master property, what is forgotten, what is freed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import (
    RandomSession,
    Recording,
    Writer,
    largest_gap,
    make_request,
    run_all,
    scheduler_for,
)
from stubs import StubEngine
from test_kernels import kernels_for
from torch import Tensor

from stretto.engines.fused import FusedEngine
from stretto.engines.hf import HFEngine
from stretto.masks import dense_mask, flat_positions, flat_tokens
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler
from stretto.runtime.views import Run

TOLERANCE = 1e-4
NUM_SLOTS = 2048
DIALECTS = ["tip", "pasta+tip"]
PAGE_SIZES = [1, 2, 3, 5, 8, 16, 64]
seeds = st.integers(0, 10**6)
Rows = dict[tuple[int, int], Tensor]
"""Logits by segment handle and index."""


def fill(kept: Any, value: float) -> Any:
    """What an engine has copied out, every number of it replaced; positions stay."""
    if isinstance(kept, Tensor):
        return torch.full_like(kept, value) if kept.is_floating_point() else kept
    return type(kept)(fill(part, value) for part in kept)


class Poisoning(Recording):
    """An engine whose free slots hold `value` whenever a pass begins."""

    def __init__(self, engine: Any, value: float) -> None:
        super().__init__(engine)
        self.value = value
        self.scheduler: Scheduler | None = None
        self._clean = set(range(engine.num_slots))

    def forward(self, runs: list[Run]) -> Tensor:
        lists = [m for r in self.scheduler.running for m in r.memory.slots.values()]
        held = {slot for segment in lists for slot in segment.slots}
        if freed := sorted(self._clean - held):
            self.engine.copy_in(freed, fill(self.engine.copy_out(freed), self.value))
        self._clean = held
        return super().forward(runs)


def mixed(seed: int) -> list[Request]:
    """Requests of several dialects, strict and with grace."""
    writers = [
        Writer("tip", seed),
        Writer("tip", seed + 1, grace=True),
        Writer("pasta+tip", seed + 2, grace=seed % 2 > 0),
    ]
    return [*(w.request() for w in writers), make_request(seed, RandomSession(seed))]


def run_in(engine: Any, requests: list[Request], page_size: int, seed: int = 0) -> Scheduler:
    num_pages = NUM_SLOTS // page_size
    order = random.Random(seed).sample(range(num_pages), num_pages)
    scheduler = scheduler_for(engine, num_pages, page_size, order=order)
    if isinstance(engine, Poisoning):
        engine.scheduler = scheduler
    run_all(scheduler, requests)
    return scheduler


def rows_of(recording: Recording, request: Request) -> Rows:
    return {k[1:]: row for k, row in recording.rows.items() if k[0] == id(request.memory)}


def num_evicted(request: Request) -> int:
    return sum(event.type == "evict" for event in request.log.events)


# -- decode == one masked pass ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@settings(max_examples=5, deadline=None)
@given(seed=seeds, page_size=st.sampled_from(PAGE_SIZES))
def test_stepwise_logits_equal_one_masked_pass(kind: str, seed: int, page_size: int) -> None:
    """In batches of several dialects, on pages in any order, free slots full of garbage."""
    model = tiny_model(kind)
    engine = Poisoning(HFEngine(model, NUM_SLOTS), 1e4)
    requests = mixed(seed)
    run_in(engine, requests, page_size, seed)
    for request in requests:
        assert largest_gap(model, request, engine) < TOLERANCE


def test_the_random_models_do_kill_and_fork() -> None:
    requests = [request for seed in range(8) for request in mixed(seed)[:3]]
    run_in(Recording(StubEngine(vocab_size=96, num_slots=NUM_SLOTS)), requests, 4)
    assert sum(map(num_evicted, requests)) > 40
    traces = [request.recorder.freeze() for request in requests]
    assert sum(len(t.threads) for t in traces) > len(traces) + 10
    assert {s.role for t in traces for s in t.segments} == {
        "prompt", "pre", "step", "answer", "child",
    }  # fmt: skip


# -- what is forgotten -----------------------------------------------------------------------------


def poisoned_rows(make: Callable[[], Any], writer: Writer, page_size: int, value: float) -> Rows:
    """The logits of a request whose dead and free slots hold a value."""
    engine = Poisoning(make(), value)
    request = writer.request()
    run_in(engine, [request], page_size)
    assert num_evicted(request) > 4
    return rows_of(engine, request)


@pytest.mark.parametrize("writer", [Writer("tip", 11), Writer("pasta+tip", 7, grace=True)])
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_what_is_in_dead_and_free_slots_changes_nothing(writer: Writer, page_size: int) -> None:
    """Bit for bit, with finite garbage under the masks of the reference."""

    def make() -> HFEngine:
        return HFEngine(tiny_model("llama"), NUM_SLOTS)

    clean = poisoned_rows(make, writer, page_size, 0.0)
    for value in (1e4, -1e4):
        rows = poisoned_rows(make, writer, page_size, value)
        assert clean.keys() == rows.keys()
        assert all(torch.equal(row, rows[k]) for k, row in clean.items())


@kernels_for("float32")
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_dead_and_free_slots_are_not_even_read_where_pages_are_gathered(page_size: int) -> None:
    writer = Writer("tip", 11)

    def make() -> FusedEngine:
        return FusedEngine(tiny_model("llama", head_dim=16), NUM_SLOTS, weights="float32")

    clean = poisoned_rows(make, writer, page_size, 0.0)
    rows = poisoned_rows(make, writer, page_size, float("nan"))
    assert all(torch.equal(row, rows[k]) for k, row in clean.items())


def test_what_is_in_a_live_slot_changes_logits() -> None:
    """So the tests above can fail."""
    model = tiny_model("llama")
    engine = Recording(HFEngine(model, NUM_SLOTS))
    request = Writer("tip", 11).request()
    scheduler = scheduler_for(engine, NUM_SLOTS)
    scheduler.submit(request)
    while not num_evicted(request):
        scheduler.step()
    prompt = request.memory.slots[0].slots[:1]
    engine.engine.copy_in(prompt, fill(engine.engine.copy_out(prompt), 3.0))
    while scheduler.step():
        pass
    assert largest_gap(model, request, engine) > TOLERANCE


def test_survivors_keep_what_they_took_from_a_dead_step() -> None:
    """Computing them again from the text without the dead steps gives other logits: nobody may."""
    model = tiny_model("llama")
    engine = Recording(HFEngine(model, NUM_SLOTS))
    request = Writer("tip", 11).request()
    run_in(engine, [request], 1)
    trace = request.recorder.freeze()
    visible = dense_mask(trace)
    last = max(q for q in range(len(visible)) if not bool(visible[q, :q].all()))
    kept = visible[last].nonzero()[:, 0]
    assert len(kept) < last + 1
    with torch.inference_mode():
        again = model(
            input_ids=flat_tokens(trace)[kept][None], position_ids=flat_positions(trace)[kept][None]
        ).logits[0, -1]
    flat = {}
    for segment in request.recorder.document_order():
        for index in range(len(segment.tokens)):
            flat[len(flat)] = segment.handle, index
    decoded = rows_of(engine, request)[flat[last]]
    assert float((again - decoded).abs().max()) > 1e-2


# -- what is freed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_are_those_of_what_is_visible_after_every_step(page_size: int) -> None:
    """One list a step, given back by the pass that kills it; the bound of design 2.2 holds."""
    request = Writer("tip", 11, num_registers=4, num_items=60).request()
    engine = StubEngine(vocab_size=96, num_slots=NUM_SLOTS)
    scheduler = scheduler_for(engine, NUM_SLOTS // page_size, page_size)
    scheduler.submit(request)
    while scheduler.step():
        main = request.recorder.threads["main"]
        if not main.is_open:
            continue
        fed = [len(request.memory.slots[h].slots) for h in main.sees if h in request.memory.slots]
        own = (
            len(request.memory.slots[main.own.handle].slots)
            if main.own.handle in request.memory.slots
            else 0
        )
        sizes = [n for n in [*fed, own] if n]
        assert request.memory.num_pages == sum(map(scheduler.pool.pages_for, sizes))
        live, slots = sum(sizes), request.memory.num_pages * page_size
        assert live <= slots <= live + (4 + 3) * (page_size - 1)
    assert num_evicted(request) > 4
    assert scheduler.pool.num_free_pages == scheduler.pool.num_pages


def test_a_kill_admits_a_waiting_request() -> None:
    """The pages of a dead step go to a request that waits for them, while the first still runs."""
    writer = Writer("tip", 0)
    (zero, one), word = [writer.vocabulary.control[f"reg_{i}"] for i in range(2)], 20
    long = [zero, *[word] * 20, one, *[word] * 3, zero, *[word] * 30]
    first = writer.request(script=lambda thread, index: long[index] if index < len(long) else 60)
    second = make_request(1, RandomSession(1), script=lambda thread, index: word)
    scheduler = scheduler_for(StubEngine(vocab_size=96), 40)
    scheduler.submit(first)
    for _ in range(20):
        scheduler.step()
    scheduler.submit(second)
    while not scheduler.pool.num_free_pages >= 20:
        held = scheduler.pool.num_free_pages
        assert second in scheduler.waiting or held > 0
        scheduler.step()
    scheduler.step()
    assert second in scheduler.running or second.is_done
    assert not first.is_done


@pytest.mark.parametrize(("dialect", "room"), [("tip", 48), ("pasta+tip", 112)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_preempted_requests_come_back_bit_for_bit(dialect: str, room: int, page_size: int) -> None:
    """In an engine whose bits depend on what is visible alone, and tell KV computed anew."""
    preempted = compared = 0
    for seed in range(6):
        found = []
        for num_slots in (NUM_SLOTS, room):
            engine = Recording(StubEngine(vocab_size=96, num_slots=NUM_SLOTS))
            requests = [Writer(dialect, seed + k, grace=bool(k % 2)).request() for k in range(4)]
            scheduler = scheduler_for(engine, num_slots // page_size, page_size)
            run_all(scheduler, requests)
            preempted += scheduler.num_preemptions if num_slots < NUM_SLOTS else 0
            found.append([(r.finish_reason, rows_of(engine, r)) for r in requests])
        for (reason, rows), (other_reason, others) in zip(*found, strict=True):
            if other_reason == reason:
                assert rows.keys() == others.keys()
                assert all(torch.equal(row, others[k]) for k, row in rows.items())
                compared += 1
    assert preempted > 3
    assert compared > 12


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_pool_drains_when_a_request_is_cancelled_or_fails(dialect: str) -> None:
    class Failing(StubEngine):
        def forward(self, runs: list[Run]) -> Tensor:
            if self.num_passes == 30:
                raise RuntimeError("out of order")
            return super().forward(runs)

    scheduler = scheduler_for(StubEngine(vocab_size=96), 256, 4)
    requests = [Writer(dialect, seed).request() for seed in (3, 5)]
    for request in requests:
        scheduler.submit(request)
    for _ in range(25):
        scheduler.step()
    for request in requests:
        scheduler.cancel(request)
        scheduler.check_integrity()
    assert scheduler.pool.num_free_pages == scheduler.pool.num_pages

    scheduler = scheduler_for(Failing(vocab_size=96), 256, 4)
    request = Writer(dialect, 5).request(script=lambda thread, index: 20)
    scheduler.submit(request)
    while scheduler.step():
        scheduler.check_integrity()
    assert (request.finish_reason, request.error) == ("error", "out of order")
    assert scheduler.pool.num_free_pages == scheduler.pool.num_pages
