"""Prompts that begin alike are fed once: the same answers, with books that add up."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import RandomSession
from stubs import StubEngine
from tiny_lms import tiny_lm

from stretto import LM, SamplingParams
from stretto.dialects.plain import PlainSession
from stretto.engines.flex import FlexEngine
from stretto.engines.fused import FusedEngine
from stretto.engines.hf import HFEngine
from stretto.runtime.events import Token
from stretto.runtime.memory import RequestMemory
from stretto.runtime.pool import Pool, PoolError, SlotList
from stretto.runtime.prefixes import Prefixes
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler

PAGE_SIZES = [1, 2, 3, 4, 7, 16, 64]
Answer = tuple[str | None, tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]]


def make(prompt: Sequence[int], session: Any = None, *, max_tokens: int = 8, **kw: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=kw.pop("temperature", 0.0), seed=5)
    return Request(
        list(prompt),
        PlainSession() if session is None else session,
        params,
        **{"decode": str, "end_ids": frozenset(), "max_positions": 512, **kw},
    )


def prompts_that_begin_alike(rng: random.Random, count: int) -> list[list[int]]:
    """Each begins with some of what an earlier one has, or is the same, or its own."""
    found = [[rng.randrange(90) for _ in range(rng.randrange(1, 90))]]
    while len(found) < count:
        other = rng.choice(found)
        own = [rng.randrange(90) for _ in range(rng.randrange(0, 30))]
        cut = rng.choice([0, len(other), rng.randrange(len(other) + 1)])
        found.append((other[:cut] + own) or [1])
    return found


def mix(seed: int, count: int, *, forks: bool = True) -> list[Request]:
    rng = random.Random(f"mix {seed}")
    prompts = prompts_that_begin_alike(rng, count)
    return [
        make(
            prompt,
            RandomSession(seed + k) if forks and rng.random() < 0.5 else PlainSession(),
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.0, 1.0]),
            sample=k,
        )
        for k, prompt in enumerate(prompts)
    ]


def answer(request: Request) -> Answer:
    segments = request.recorder.freeze().segments
    return request.finish_reason, tuple((s.thread, s.tokens, s.positions) for s in segments)


def free_slots(pool: Pool) -> list[int]:
    """Those on which nothing lies that anybody will read."""
    size = pool.page_size
    pages = [pool._by_rank[rank] for rank in pool._free]
    return [page * size + i for page in pages for i in range(size)]


def alone(engine: Any, request: Request, num_pages: int, page_size: int) -> Answer:
    scheduler = Scheduler(engine, Pool(num_pages, page_size))
    scheduler.submit(request)
    while scheduler.step():
        pass
    return answer(request)


def check_crowd(seed: int, page_size: int, room: float, max_rows: int) -> tuple[int, int]:
    """Random requests that come at random times, in pools that barely hold one of them; some are
    cancelled, and what is free is full of garbage. How many tokens were taken over, and how often
    one was preempted."""
    rng = random.Random(seed)
    pages = [
        sum(-(-len(s) // page_size) for s in (r.recorder.segments[0].tokens, [0])) + 1
        for r in mix(seed, 5)
    ]
    num_pages = int(max(pages) * room) + 12
    order = rng.sample(range(num_pages), num_pages)
    engine = StubEngine(96, num_slots=num_pages * page_size)
    engine.prefers_low_slots = rng.random() < 0.5  # type: ignore[attr-defined]
    pool = Pool(num_pages, page_size, order)
    scheduler = Scheduler(engine, pool, max_rows, shares_prompts=True)
    requests, late = mix(seed, 5), list(mix(seed, 5))
    for request in requests:
        request.memory.owner = rng.choice(["one", "one", "two"])
    waiting = list(requests)
    doomed = {id(r): rng.randrange(1, 30) for r in requests if rng.random() < 0.25}
    num_steps = 0
    while waiting or scheduler.running or scheduler.waiting:
        while waiting and rng.random() < 0.4:
            scheduler.submit(waiting.pop(0))
        scheduler.step()
        scheduler.check_integrity()
        num_steps += 1
        for request in requests:
            if doomed.get(id(request)) == num_steps and request not in waiting:
                scheduler.cancel(request)
                scheduler.check_integrity()
        engine.state[:, free_slots(pool)] = np.uint64(rng.randrange(1, 1 << 63))
        assert num_steps < 3000
    assert pool.num_free_pages == num_pages
    assert pool.num_holds == 0
    for request, twin in zip(requests, late, strict=True):
        mine = answer(request)
        lonely = StubEngine(96, num_slots=num_pages * page_size)
        if mine[0] == "cancelled":
            continue
        assert mine == alone(lonely, twin, num_pages, page_size)
    return sum(r.memory.num_adopted for r in requests), scheduler.num_preemptions


def test_answers_are_those_of_requests_alone() -> None:
    found: list[tuple[int, int]] = []

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        page_size=st.sampled_from(PAGE_SIZES),
        room=st.sampled_from([1.0, 1.5, 6.0]),
        max_rows=st.sampled_from([5, 512]),
    )
    def check(**drawn: Any) -> None:
        found.append(check_crowd(**drawn))

    check()
    assert sum(adopted > 0 for adopted, _ in found) >= 5
    assert sum(preempted > 0 for _, preempted in found) >= 5


def engines() -> dict[str, Any]:
    return {
        "hf": lambda n, page: HFEngine(tiny_model("llama"), n),
        "gemma2": lambda n, page: HFEngine(tiny_model("gemma2"), n),
        "fused": lambda n, page: FusedEngine(tiny_model("qwen2", head_dim=16), n),
        "flex": lambda n, page: FlexEngine(tiny_model("llama"), n, page, block_size=page),
    }


EVERY_ENGINE = pytest.mark.parametrize(
    ("name", "page_size"), [("hf", 1), ("gemma2", 4), ("fused", 1), ("fused", 16), ("flex", 16)]
)


@EVERY_ENGINE
def test_every_engine_reads_what_another_request_has_written(name: str, page_size: int) -> None:
    """Also the answers of requests that have ended."""
    num_pages = 192 // page_size
    engine = engines()[name](num_pages * page_size, page_size)
    scheduler = Scheduler(engine, Pool(num_pages, page_size), shares_prompts=True)
    requests, twins = mix(2, 4), mix(2, 4)
    for turn in (requests[:3], requests[3:]):
        for request in turn:
            scheduler.submit(request)
        while scheduler.step():
            scheduler.check_integrity()
    assert sum(r.memory.num_adopted for r in requests) > 0
    other = engines()[name](num_pages * page_size, page_size)
    for request, twin in zip(requests, twins, strict=True):
        assert answer(request) == alone(other, twin, num_pages, page_size)


@EVERY_ENGINE
def test_every_engine_goes_on_with_what_was_put_back(name: str, page_size: int) -> None:
    """Three with one long beginning, in a pool that does not hold them to their ends."""
    num_pages = 160 // page_size
    engine = engines()[name](num_pages * page_size, page_size)
    scheduler = Scheduler(engine, Pool(num_pages, page_size), shares_prompts=True)

    def three() -> list[Request]:
        prompts = [[*range(48), *[60 + k] * 8] for k in range(3)]
        return [make(p, max_tokens=40, temperature=k / 2) for k, p in enumerate(prompts)]

    requests = three()
    for request in requests:
        scheduler.submit(request)
    while scheduler.step():
        scheduler.check_integrity()
    assert scheduler.num_preemptions > 0
    assert [r.memory.num_adopted for r in requests] == [0, 48, 48]
    other = engines()[name](num_pages * page_size, page_size)
    for request, twin in zip(requests, three(), strict=True):
        assert answer(request) == alone(other, twin, num_pages, page_size)


@pytest.mark.parametrize(
    ("name", "weights", "tolerance"),
    [
        ("fused", "float32", 0.0),
        ("fused", "bfloat16", 0.0),
        ("fused", "int8", 0.0),
        ("hf", "float32", 1e-4),
        ("hf", "bfloat16", 0.1),
    ],
)
def test_what_is_shared_moves_log_probs_by_rounding_alone(
    name: str, weights: str, tolerance: float
) -> None:
    """A turn that goes on behind an answer, whose keys and values were written one by one. Those of
    an engine that is `batch_invariant` are the same bits as if they had been fed together."""
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    model = copy.deepcopy(tiny_model("qwen2", head_dim=16)).to(dtype)
    said = [(7 * i + 3) % 90 for i in range(24)]

    def logprobs(shares_prompts: bool) -> list[float]:
        engine = (
            FusedEngine(model, 256, weights=weights) if name == "fused" else HFEngine(model, 256)
        )
        assert engine.batch_invariant is (tolerance == 0.0)
        scheduler = Scheduler(engine, Pool(256), shares_prompts=shares_prompts)
        prompts = [*range(40)], [*range(40), *said, 1, 2, 3]
        requests = [make(p, max_tokens=24, script=lambda _, i: said[i]) for p in prompts]
        for request in requests:
            scheduler.submit(request)
            while scheduler.step():
                pass
        assert requests[1].memory.num_adopted == (63 if shares_prompts else 0)
        found = [e.logprob for e in requests[1].log.events if isinstance(e, Token)]
        return [logprob for logprob in found if logprob is not None]

    mine, plain = logprobs(True), logprobs(False)
    assert len(mine) == 24
    assert max(abs(a - b) for a, b in zip(mine, plain, strict=True)) <= tolerance


def test_the_property_can_fail() -> None:
    """Pages of other tokens are noticed."""
    engine = StubEngine(96)
    scheduler = Scheduler(engine, Pool(256), shares_prompts=True)
    assert scheduler.sharing is not None
    first, second = make(range(20)), make(range(1, 21))
    scheduler.submit(first)
    scheduler.step()
    scheduler.step()
    known = scheduler.sharing.prefixes.walk(list(range(20)))
    scheduler.sharing.prefixes.walk = lambda *_: known[:10]  # type: ignore[method-assign]
    scheduler.submit(second)
    while scheduler.step():
        pass
    assert answer(second) != alone(StubEngine(96), make(range(1, 21)), 256, 1)


@pytest.mark.parametrize("page_size", [1, 8])
def test_samples_of_one_prompt_encode_it_once(page_size: int) -> None:
    engine = StubEngine(96)
    scheduler = Scheduler(engine, Pool(1024 // page_size, page_size), shares_prompts=True)
    prompt = list(range(64))
    samples = [make(prompt, max_tokens=2, sample=sample) for sample in range(8)]
    for request in samples:
        scheduler.submit(request)
    scheduler.step()
    assert [len(scheduler.running), len(scheduler.waiting)] == [1, 7]
    scheduler.step()
    adopted = [request.memory.num_adopted for request in samples]
    assert adopted == [0, *[63 // page_size * page_size] * 7]
    held = {page for r in scheduler.running for page in r.memory.slots[0].pages}
    assert len(held) <= 64 // page_size + 7
    while scheduler.step():
        pass
    assert engine.num_rows == 64 + 7 * (64 - 63 // page_size * page_size) + 8


def test_a_short_prompt_that_begins_alike_waits_for_nobody() -> None:
    scheduler = Scheduler(StubEngine(96), Pool(256), shares_prompts=True)
    for last in range(3):
        scheduler.submit(make([*range(5), *[50 + last] * 20]))
    scheduler.step()
    assert len(scheduler.running) == 3


def test_nobody_waits_for_the_rest_of_a_long_prompt() -> None:
    scheduler = Scheduler(StubEngine(96), Pool(256), max_rows=20, shares_prompts=True)
    long, short = make(range(90)), make([*range(20), 77, 78])
    for request in (long, short):
        scheduler.submit(request)
    scheduler.step()
    assert scheduler.running == [long]
    scheduler.step()
    assert scheduler.running == [long, short]
    assert short.memory.num_adopted == 20


def test_what_is_cached_goes_before_anybody_is_preempted() -> None:
    scheduler = Scheduler(StubEngine(96), Pool(100), shares_prompts=True)
    for first in range(8):
        scheduler.submit(make([first] * 30, max_tokens=9))
        while scheduler.step():
            scheduler.check_integrity()
    pool = scheduler.pool
    assert pool.num_free_pages == 100
    assert pool.num_cached_pages > 60
    assert scheduler.num_preemptions == 0
    again = make([7] * 30)  # the youngest is still there, the oldest is not
    gone = make([0] * 30)
    for request in (again, gone):
        scheduler.submit(request)
        while scheduler.step():
            pass
    assert again.memory.num_adopted == 29
    assert gone.memory.num_adopted == 0
    big = make(list(range(90)), max_tokens=8)
    scheduler.submit(big)
    while scheduler.step():
        scheduler.check_integrity()
    assert (big.finish_reason, scheduler.num_preemptions) == ("length", 0)


def test_a_turn_goes_on_from_the_answer_before_it() -> None:
    """Pages of an answer follow those of its prompt only where that ends with a page."""
    for page_size, adopted in ((1, 47), (4, 44), (8, 40), (7, 35), (16, 32), (64, 0)):
        pool = Pool(256 // page_size, page_size)
        scheduler = Scheduler(StubEngine(96), pool, shares_prompts=True)
        first = make(range(40), max_tokens=8)
        scheduler.submit(first)
        while scheduler.step():
            pass
        said = first.recorder.segments[1].tokens
        second = make([*first.recorder.segments[0].tokens, *said, 1, 2, 3])
        scheduler.submit(second)
        while scheduler.step():
            scheduler.check_integrity()
        assert second.memory.num_adopted == adopted


class Hidden(PlainSession):
    """From its third token on it sees nothing of the prompt, whose slots it gives up."""

    def feed(self, recorder: Any, thread: Any, token: int) -> Any:
        from stretto.effects import Evict

        moves = super().feed(recorder, thread, token)
        return moves if thread.num_drawn < 3 else [*(Evict(h) for h in thread.sees), *moves]


def test_only_what_sees_all_before_it_is_kept() -> None:
    scheduler = Scheduler(StubEngine(96), Pool(256), shares_prompts=True)
    first = make(range(40), Hidden())
    scheduler.submit(first)
    while scheduler.step():
        scheduler.check_integrity()
    said = [token for segment in first.recorder.segments for token in segment.tokens]
    again = make(said)
    scheduler.submit(again)
    while scheduler.step():
        scheduler.check_integrity()
    assert again.memory.num_adopted == 40 < len(said) - 1


def test_requests_with_a_policy_take_no_part() -> None:
    from stretto.methods.streaming_llm import StreamingLLM

    method = StreamingLLM(budget=20, sinks=2)
    scheduler = Scheduler(StubEngine(96), Pool(256), shares_prompts=True)
    plain = make(range(40))
    scheduler.submit(plain)
    while scheduler.step():
        pass
    policy = method.policy(40, SamplingParams(max_tokens=8), pool_page=1, sample=0)
    hidden = make(range(40), policy=policy)
    scheduler.submit(hidden)
    while scheduler.step():
        scheduler.check_integrity()
    assert hidden.memory.num_adopted == 0
    policy = method.policy(40, SamplingParams(max_tokens=8), pool_page=1, sample=0)
    assert answer(hidden) == alone(StubEngine(96), make(range(40), policy=policy), 256, 1)


def test_nothing_is_taken_over_after_the_weights_have_changed() -> None:
    scheduler = Scheduler(StubEngine(96), Pool(256), shares_prompts=True)
    under_way = make(range(40))
    scheduler.submit(under_way)
    scheduler.step()
    scheduler.forget()
    while scheduler.step():
        scheduler.check_integrity()
    assert scheduler.pool.num_cached_pages == 0
    later = make(range(40))
    scheduler.submit(later)
    scheduler.step()
    assert later.memory.num_adopted == 0


class Failing:
    """Fails in passes with the first request's rows, and in those that are broken off."""

    def __init__(self, target: Request) -> None:
        self.engine = StubEngine(96)
        self.target: Request | None = target
        self.is_interrupted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, runs: Any) -> torch.Tensor:
        if self.is_interrupted:
            raise KeyboardInterrupt
        if self.target and any(run.view.memory is self.target.memory for run in runs):
            raise RuntimeError("no such kernel")
        return self.engine.forward(runs)


def test_who_waited_for_one_that_fails_answers_by_itself() -> None:
    leader, follower = make(range(40)), make(range(40), sample=1)
    scheduler = Scheduler(Failing(leader), Pool(256), shares_prompts=True)  # type: ignore[arg-type]
    for request in (leader, follower):
        scheduler.submit(request)
    while scheduler.step():
        scheduler.check_integrity()
    assert leader.finish_reason == "error"
    assert follower.memory.num_adopted == 0
    assert answer(follower) == alone(StubEngine(96), make(range(40), sample=1), 256, 1)


def test_nothing_is_known_after_a_pass_that_was_broken_off() -> None:
    engine = Failing(make([1]))
    scheduler = Scheduler(engine, Pool(256), shares_prompts=True)  # type: ignore[arg-type]
    scheduler.submit(make(range(40)))
    scheduler.step()
    scheduler.step()
    engine.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    engine.is_interrupted = False
    again = make(range(40))
    scheduler.submit(again)
    while scheduler.step():
        scheduler.check_integrity()
    assert again.memory.num_adopted == 0
    assert answer(again) == alone(StubEngine(96), make(range(40)), 256, 1)


def test_owners_know_nothing_of_one_another() -> None:
    """Neither of what is in the pool nor of what is being fed."""
    scheduler = Scheduler(StubEngine(96), Pool(512), shares_prompts=True)
    requests = {name: make(range(40)) for name in ("one", "two", "one again", "two again")}
    for name, request in requests.items():
        request.memory.owner = name.split()[0]
    for name in ("one", "two"):
        scheduler.submit(requests[name])
    scheduler.step()
    assert len(scheduler.running) == 2  # the second waits for nothing of the first's
    while scheduler.step():
        scheduler.check_integrity()
    for name in ("one again", "two again"):
        scheduler.submit(requests[name])
    while scheduler.step():
        scheduler.check_integrity()
    assert [r.memory.num_adopted for r in requests.values()] == [0, 0, 39, 39]


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_kept_lengthens_no_pass_of_an_engine_that_reads_the_whole_pool(
    page_size: int,
) -> None:
    """It reads up to the last slot in use: no further, after any number of prompts, than the most
    that were held at once."""

    class Wide(StubEngine):
        prefers_low_slots = True
        width = most = 0

        def forward(self, runs: Any) -> torch.Tensor:
            self.width = max(self.width, *(max(run.slots) + 1 for run in runs))
            self.most = max(self.most, pool.num_slots - pool.num_free_pages * page_size)
            return super().forward(runs)

    engine = Wide(96)
    for is_wide in (True, False):
        engine.prefers_low_slots, engine.width = is_wide, 0
        pool = Pool(1024 // page_size, page_size)
        scheduler = Scheduler(engine, pool, shares_prompts=True)
        for turn in range(20):
            for first in range(1 + turn % 2):
                scheduler.submit(make([*range(8), *[turn, first] * 12], max_tokens=5))
            while scheduler.step():
                scheduler.check_integrity()
        assert pool.num_cached_pages > 0
        assert (engine.width <= engine.most) is is_wide
    assert HFEngine.prefers_low_slots


def run_until(scheduler: Scheduler, is_so: Callable[[], bool]) -> None:
    while not is_so():
        goes_on = scheduler.step()
        scheduler.check_integrity()
        assert goes_on or is_so()


def test_who_comes_back_holds_again_what_others_have() -> None:
    """Two with one long beginning, in a pool that holds it once; the younger is preempted."""
    scheduler = Scheduler(StubEngine(96), Pool(135), shares_prompts=True)
    begin = [*range(80)]
    older, younger = make([*begin, 90], max_tokens=40), make([*begin, 91], max_tokens=30)
    for request in (older, make([95] * 20, max_tokens=14), younger):
        scheduler.submit(request)
    run_until(scheduler, lambda: scheduler.num_preemptions == 1)
    assert scheduler.waiting == [younger]
    assert younger.memory.pages_to_restore(scheduler.pool) < 20
    run_until(scheduler, lambda: younger in scheduler.running)
    assert older in scheduler.running
    assert younger.memory.slots[0].pages[:80] == older.memory.slots[0].pages[:80]
    run_until(scheduler, lambda: older.is_done and younger.is_done)
    for request in (older, younger):
        prompt = request.recorder.segments[0].tokens[:81]
        twin = make(prompt, max_tokens=request.params.max_tokens)
        assert answer(request) == alone(StubEngine(96), twin, 135, 1)


def test_what_was_shared_and_is_gone_is_put_back() -> None:
    """The other one has ended, and its pages were taken, before the preempted one comes back."""
    scheduler = Scheduler(StubEngine(96), Pool(150), shares_prompts=True)
    prompt = [*range(40)]
    first, second = make(prompt, max_tokens=60), make(prompt, max_tokens=60, sample=1)
    for request in (make([95] * 20, max_tokens=100), first, second):
        scheduler.submit(request)
    run_until(scheduler, lambda: scheduler.num_preemptions == 1)
    assert scheduler.waiting == [second]
    copied = second.memory._copy
    assert copied is not None
    assert len(copied.pages) == 39
    scheduler.cancel(first)
    scheduler.forget()
    assert not copied.still_shared(scheduler.pool)
    run_until(scheduler, lambda: second.is_done)
    assert answer(second) == alone(StubEngine(96), make(prompt, max_tokens=60, sample=1), 150, 1)


def test_what_came_back_is_known_again() -> None:
    scheduler = Scheduler(StubEngine(96), Pool(100), shares_prompts=True)
    younger, later = make(range(40), max_tokens=60), make(range(40), max_tokens=2)
    for request in (make([95] * 30, max_tokens=60), younger):
        scheduler.submit(request)
    run_until(scheduler, lambda: scheduler.num_preemptions == 1)
    run_until(scheduler, lambda: younger in scheduler.running)
    assert scheduler.sharing is not None
    assert len(scheduler.sharing.prefixes.find(list(range(40)))) < 39  # room was needed meanwhile
    scheduler.submit(later)
    run_until(scheduler, lambda: later.is_done)
    assert younger in scheduler.running
    assert later.memory.num_adopted == 39


def test_a_shared_page_is_never_written_to() -> None:
    pool = Pool(4, 4)
    own = SlotList()
    pool.extend(own, 6)
    shared = pool.share(own.pages)
    with pytest.raises(PoolError, match="held by others"):
        pool.extend(own, 1)
    pool.free(shared)
    assert pool.extend(own, 1) == [own.pages[1] * 4 + 2]
    pool.check_integrity()


def test_pages_are_cached_from_their_end_and_reused_from_the_oldest() -> None:
    pool = Pool(4)
    prefixes = Prefixes(pool)
    first = SlotList()
    pool.extend(first, 3)
    prefixes.put([7, 8, 9], first.pages)
    pages = list(first.pages)
    pool.free(first)
    pool.check_integrity()
    assert (pool.num_free_pages, pool.num_cached_pages) == (4, 3)
    assert prefixes.find([7, 8, 9, 9]) == pages
    second = SlotList()
    pool.extend(second, 2)
    assert prefixes.find([7, 8, 9, 9]) == pages[:2]
    prefixes.drop(pages[0])
    assert prefixes.find([7, 8]) == []
    pool.check_integrity()
    assert pool.num_cached_pages == 0


def test_a_page_whose_beginning_is_gone_is_not_found_by_its_end() -> None:
    pool = Pool(6)
    prefixes = Prefixes(pool)
    begin, end = SlotList(), SlotList()
    pool.extend(begin, 2)
    pool.extend(end, 2)
    prefixes.put([1, 2, 3, 4], [*begin.pages, *end.pages])
    pool.free(begin)
    rest = SlotList()
    pool.extend(rest, 4)  # takes both pages of the beginning
    assert prefixes.find([1, 2, 3, 4]) == []
    pool.check_integrity()
    pool.free(end)
    assert (pool.num_free_pages, pool.num_cached_pages) == (2, 0)


def test_the_books_tell_a_page_that_is_held_too_often() -> None:
    pool = Pool(4)
    own = SlotList()
    pool.extend(own, 2)
    pool.share(own.pages)
    pool.check_integrity()
    pool._num_holders[own.pages[0]] += 1
    with pytest.raises(PoolError, match="in the books"):
        pool.check_integrity()


PROMPTS = ["What is a fugue?", "What is a fugue, then?", "Name three.", "What is a fugue?"]


@pytest.mark.parametrize("dialect", ["plain", "pasta", "tip", "pasta+tip", "apar", "planned"])
def test_models_of_every_dialect_answer_the_same(dialect: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=2)
    shared, plain = tiny_lm(dialect, prefix_cache=True), tiny_lm(dialect)
    for turn in range(2):
        mine = shared.generate(PROMPTS, params, n=2)
        expected = plain.generate(PROMPTS, params, n=2)
        assert [c.annotated for c in mine] == [c.annotated for c in expected]
        assert [c.finish_reason for c in mine] == [c.finish_reason for c in expected]
        assert sum(c.usage.cached_tokens > 0 for c in mine) >= (8 if turn else 5)
        assert not any(c.usage.cached_tokens for c in expected)
    shared.scheduler.check_integrity()
    assert shared.scheduler.pool.num_free_pages == shared.scheduler.pool.num_pages


def test_the_worked_examples_of_an_outline_are_fed_once() -> None:
    lm = tiny_lm(prefix_cache=True, pool_slots=4096)
    lm.engine.max_positions = 4096
    params = SamplingParams(max_tokens=8)
    first, second = (lm.generate(p, params, method="sot")[0].usage for p in ("one?", "two?"))
    assert first.cached_tokens == 0
    assert second.cached_tokens > second.prompt_tokens - 120


def test_what_a_model_knew_before_it_was_trained_is_forgotten_on_demand() -> None:
    lm = tiny_lm(prefix_cache=True)
    lm.generate("hello there", SamplingParams(max_tokens=4))
    with torch.no_grad():
        lm.model.get_input_embeddings().weight.mul_(-1.5)
    lm.forget_prefixes()
    (later,) = lm.generate("hello there", SamplingParams(max_tokens=8))
    fresh = LM.wrap(lm.model, lm.tokenizer, pool_slots=1024)
    (expected,) = fresh.generate("hello there", SamplingParams(max_tokens=8))
    assert later.usage.cached_tokens == 0
    assert later.text == expected.text


def test_what_was_never_put_back_is_not_kept() -> None:
    """A copy that fails on its way back leaves pages with what others wrote."""

    class Failing(StubEngine):
        def copy_in(self, slots: list[int], kept: Any) -> None:
            raise RuntimeError("lost")

    engine, pool, memory = Failing(8), Pool(8), RequestMemory()
    told: list[str] = []
    memory.on_leaving = lambda: told.append("left")
    memory.extend(pool, [{0: 4}])
    memory.save(engine, pool)
    with pytest.raises(RuntimeError, match="lost"):
        memory.restore(engine, pool)
    memory.free(pool)
    assert (told, pool.num_free_pages) == ([], 8)
