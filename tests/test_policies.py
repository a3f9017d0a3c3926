"""Policies: what each method hides and keeps, its budget, its pages, its random numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import run_all, scheduler_for
from policies import ALL, BUDGET, PAGE, MassStub, Weight, ask, bumpy, pinned, seen_sets
from stubs import StubEngine

from stretto.errors import InvalidInput, Unsupported
from stretto.methods.budget import Budget, parse_budget
from stretto.methods.evicting import EvictingMethod
from stretto.methods.paged_h2o import PagedH2O
from stretto.methods.random_evict import RandomEvict
from stretto.methods.spelling import read, spell
from stretto.methods.streaming_llm import StreamingLLM
from stretto.methods.window import SlidingWindow
from stretto.runtime.events import Evicted
from stretto.runtime.request import Request
from stretto.trace import live_tokens

SLOTS = 1024


def decoded(
    method: EvictingMethod | None, num_prompt: int, num_tokens: int, *, weight: Weight = bumpy,
    page_size: int = 1, **options: Any,
) -> Request:  # fmt: skip
    engine = MassStub(weight, num_slots=SLOTS)
    request = ask(method, num_prompt, num_tokens, pool_page=page_size, **options)
    run_all(scheduler_for(engine, SLOTS // page_size, page_size), [request])
    assert request.num_drawn == num_tokens
    return request


def seen(request: Request) -> list[set[int]]:
    return seen_sets(request.recorder.freeze())


# --- the budget ----------------------------------------------------------------------------------


def least_tokens(method: EvictingMethod, num_prompt: int) -> int:
    """What the method needs at all, by asking for less."""
    from dataclasses import replace

    page = method.page_tokens or 1
    if method.num_sinks == 0 and not method.pin_prompt and method.least_room(page) == 1:
        return 1
    with pytest.raises(InvalidInput) as refused:
        ask(replace(method, budget=1), num_prompt, 1)
    return int(str(refused.value).rsplit(" ", 1)[1])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_prompt", [1, PAGE - 1, PAGE, PAGE + 1, 7, BUDGET - 8])
def test_no_row_of_the_answer_sees_more_than_the_budget(name: str, num_prompt: int) -> None:
    method = ALL[name]
    if method.pin_prompt and method.budget == BUDGET and num_prompt + 4 * PAGE > BUDGET:
        num_prompt = BUDGET - 4 * PAGE
    request = decoded(method, num_prompt, 60)
    rows = seen(request)
    if method.budget == BUDGET:
        assert max(map(len, rows)) <= BUDGET
        assert len(rows[-1]) > BUDGET - 2 * PAGE  # it is made use of
    else:
        least = least_tokens(method, num_prompt)
        for i, row in enumerate(rows):
            dense = num_prompt + i + 1
            assert len(row) <= max(least, dense / 2)
        page = method.page_tokens or 1
        assert len(rows[-1]) >= (num_prompt + 60) / 2 - 2 * page
    prompt = set(range(num_prompt))
    if method.pin_prompt:
        assert all(prompt <= row for row in rows)


@pytest.mark.parametrize("name", ["window", "streaming", "random"])
@pytest.mark.parametrize("num_prompt", [1, 5, BUDGET - 1, BUDGET, BUDGET + 1, 3 * BUDGET])
def test_a_page_of_one_token_keeps_to_the_budget_exactly(name: str, num_prompt: int) -> None:
    num_tokens = 50
    request = decoded(ALL[name], num_prompt, num_tokens)
    lives = [len(row) for row in seen(request)]
    assert lives == [min(num_prompt + i + 1, BUDGET) for i in range(num_tokens)]
    free = max(0, BUDGET - num_prompt)
    mean = live_tokens(request.recorder.freeze()).mean
    assert mean == pytest.approx(BUDGET - free * (free - 1) / (2 * num_tokens))
    assert mean == pytest.approx(BUDGET - free**2 / (2 * num_tokens), abs=1)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_hidden_before_the_budget_is_reached(name: str) -> None:
    method = ALL[name]
    if method.budget != BUDGET:
        pytest.skip("a share is exceeded at once")
    request = decoded(method, PAGE, BUDGET - PAGE)
    assert [len(row) for row in seen(request)] == list(range(PAGE + 1, BUDGET + 1))
    assert not [e for e in request.log.events if isinstance(e, Evicted)]


@pytest.mark.parametrize("budget", [0.25, 0.5, 0.9])
def test_a_share_is_of_the_own_dense_length_at_each_row(budget: float) -> None:
    request = decoded(SlidingWindow(budget=budget), 10, 100)
    for i, row in enumerate(seen(request)):
        assert len(row) == max(1, int(budget * (10 + i + 1)))
    live = live_tokens(request.recorder.freeze())
    assert live.mean / live.dense_mean == pytest.approx(budget, abs=0.5 / live.dense_mean)


def test_a_share_of_one_hides_nothing() -> None:
    request = decoded(SlidingWindow(budget=1.0, page_tokens=PAGE), 9, 40)
    assert [len(row) for row in seen(request)] == list(range(10, 50))


# --- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 40])
def test_streaming_keeps_the_first_four_and_the_most_recent(num_prompt: int) -> None:
    for i, row in enumerate(seen(decoded(StreamingLLM(budget=BUDGET), num_prompt, 60))):
        at = num_prompt + i
        assert row == {*range(min(4, at + 1)), *range(max(0, at - (BUDGET - 4) + 1), at + 1)}


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 40])
def test_streaming_by_pages_keeps_the_sinks_apart(num_prompt: int) -> None:
    method = StreamingLLM(budget=BUDGET, page_tokens=5, sinks=3)
    for i, row in enumerate(seen(decoded(method, num_prompt, 60))):
        at = num_prompt + i
        assert {*range(min(3, at + 1))} <= row
        window = row - {0, 1, 2}
        assert window == set(range(min(window, default=0), max(window, default=-1) + 1))
        assert at < BUDGET or len(row) > BUDGET - 2 * 5


def test_a_window_keeps_the_most_recent_and_a_pinned_prompt() -> None:
    for i, row in enumerate(seen(decoded(SlidingWindow(budget=BUDGET), 10, 60))):
        assert row == set(range(max(0, 10 + i - BUDGET + 1), 10 + i + 1))
    for i, row in enumerate(seen(decoded(SlidingWindow(budget=BUDGET, pin_prompt=True), 10, 60))):
        assert row == {*range(10), *range(max(10, 10 + i - (BUDGET - 10) + 1), 10 + i + 1)}


def heavy_hitters(
    num_prompt: int, num_tokens: int, weight: Weight, *, is_pinned: bool
) -> list[set[int]]:
    """What PagedH2O keeps, by a simulation over token indices that knows no runtime."""
    starts = [0] if is_pinned else list(range(0, num_prompt, PAGE))
    pages = [[*range(a, b)] for a, b in zip(starts, [*starts[1:], num_prompt], strict=True)]
    score: dict[int, float] = {}

    def attend(query: int) -> None:
        keys = [k for page in pages for k in page if k <= query]
        total = sum(weight(query, k) for k in keys)
        for k in keys:
            score[k] = score.get(k, 0.0) + weight(query, k) / total

    for query in range(num_prompt):
        attend(query)
    rows = []
    for at in range(num_prompt, num_prompt + num_tokens):
        if at == num_prompt or len(pages[-1]) == PAGE:
            fixed = pages[:1] if is_pinned else []
            rest = pages[len(fixed) :]
            room = BUDGET - sum(map(len, fixed))
            recent = set(range(at - room // 2, at))
            while sum(map(len, rest)) + PAGE > room:
                old = [p for p in rest if not recent & set(p)]
                rest.remove(min(old, key=lambda p: sum(score[k] for k in p) / len(p)))
            pages = [*fixed, *rest, []]
        pages[-1].append(at)
        rows.append({k for page in pages for k in page})
        attend(at)
    return rows


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8])
def test_h2o_equals_a_simulation(num_prompt: int, is_pinned: bool) -> None:
    method = PagedH2O(budget=BUDGET, page_tokens=PAGE, pin_prompt=is_pinned)
    expected = heavy_hitters(num_prompt, 80, bumpy, is_pinned=is_pinned)
    assert seen(decoded(method, num_prompt, 80)) == expected


def test_h2o_keeps_the_recent_half_and_its_heavy_half_moves() -> None:
    rows = seen(decoded(PagedH2O(budget=BUDGET, page_tokens=PAGE), 40, 120))
    for i, row in enumerate(rows):
        at = 40 + i
        assert set(range(at - BUDGET // 2 + 1, at + 1)) <= row
    old = [frozenset(k for k in row if k < 40 + i - BUDGET) for i, row in enumerate(rows)]
    assert len(set(old)) > 5
    newcomers = {k for row in old for k in row if k >= 40}
    assert newcomers, "nothing that was written after the prompt was ever heavy"


def test_a_token_that_all_attend_to_stays() -> None:
    def on_page_of_9(query: int, key: int) -> float:
        return 100.0 if key == 9 else 1.0

    method = PagedH2O(budget=BUDGET, page_tokens=PAGE)
    rows = seen(decoded(method, 20, 50, weight=on_page_of_9))
    assert all({8, 9, 10, 11} <= row for row in rows)
    rows = seen(decoded(method, 20, 50, weight=lambda query, key: 1.0))
    assert not rows[-1] & {8, 9, 10, 11}


# --- random numbers ------------------------------------------------------------------------------


def test_random_eviction_is_a_function_of_seed_and_sample() -> None:
    def kept(seed: int, sample: int) -> list[set[int]]:
        request = ask(RandomEvict(budget=BUDGET), 30, 40, seed=seed, sample=sample, script=None)
        run_all(scheduler_for(StubEngine(96), SLOTS), [request])
        return seen(request)

    assert kept(1, 0) == kept(1, 0)
    assert len({str(kept(seed, sample)) for seed in (1, 2) for sample in (0, 1)}) == 4


def test_random_eviction_is_even() -> None:
    """After a prompt of 40 tokens is cut down to 10, each is left as often as another."""
    counts = [0] * 40
    for sample in range(300):
        request = ask(RandomEvict(budget=11), 40, 1, sample=sample)
        main = request.recorder.threads["main"]
        evicted = {e.segment for e in request.policy.act(request.recorder, main, None)}
        for k in set(range(40)) - evicted:
            counts[k] += 1
    assert sum(counts) == 3000
    assert 40 < min(counts) <= max(counts) < 115  # 75 on average, 7.5 its deviation


# --- positions, pages, the pool ------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_position_counter_is_the_number_of_tokens_ever_produced(name: str) -> None:
    request = decoded(ALL[name], 5, 70)
    positions = [p for s in request.recorder.freeze().segments for p in s.positions]
    assert positions == list(range(75))
    assert request.recorder.threads["main"].next_position == 75


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_the_pool_holds_the_budget_and_no_more(name: str, page_size: int) -> None:
    method = ALL[name]
    num_prompt = 8
    request = decoded(method, num_prompt, 80, page_size=page_size)
    trace = request.recorder.freeze()
    peak = live_tokens(trace).peak
    num_pages = request.memory.peak_pages
    if (method.page_tokens or page_size) % page_size == 0:
        # Whole pages, but for the sinks' tail, the prompt's, and the page under way.
        assert num_pages * page_size <= max(peak, num_prompt) + 3 * page_size
        assert num_pages * page_size < num_prompt + 80


def test_the_default_page_is_the_pools() -> None:
    def sizes(method: EvictingMethod, page_size: int) -> set[int]:
        trace = decoded(method, 3, 90, page_size=page_size).recorder.freeze()
        return {len(s) for s in trace.response[:-1]}

    assert sizes(SlidingWindow(budget=64), 1) == {1}
    assert sizes(SlidingWindow(budget=64), 8) == {8}
    assert sizes(PagedH2O(budget=64), 1) == {16}
    assert sizes(SlidingWindow(budget=64, page_tokens=3), 8) == {3}


def test_pages_come_back_at_once_and_a_waiting_request_is_admitted() -> None:
    """The second prompt fits only into what the first one's has left behind."""
    requests = [ask(SlidingWindow(budget=16), 40, 30, seed=seed) for seed in (0, 1)]
    scheduler = scheduler_for(StubEngine(96), 60)
    for request in requests:
        scheduler.submit(request)
    scheduler.step()
    assert [r in scheduler.running for r in requests] == [True, False]
    assert scheduler.pool.num_free_pages == 60 - 15
    scheduler.step()
    assert scheduler.running == requests
    while scheduler.step():
        scheduler.check_integrity()
    assert scheduler.num_preemptions == 0
    assert [r.finish_reason for r in requests] == ["length", "length"]
    assert scheduler.pool.num_free_pages == 60


def test_dense_requests_do_not_fit_where_those_do() -> None:
    requests = [ask(None, 20, 30, seed=seed) for seed in (0, 1)]
    scheduler = scheduler_for(StubEngine(96), 60)
    run_all(scheduler, requests)
    assert scheduler.num_preemptions > 0


def test_a_prompt_in_pages_is_refused_by_the_slots_that_they_take() -> None:
    scheduler = scheduler_for(StubEngine(96), 4, 8)
    with pytest.raises(InvalidInput, match="needs 40 KV slots but the pool has 32"):
        scheduler.submit(ask(SlidingWindow(budget=8, page_tokens=2), 10, 5))


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), page_size=st.sampled_from([1, 2, 4]))
def test_a_batch_answers_as_one_by_one(name: str, seed: int, page_size: int) -> None:
    """Also with preemptions, and beside requests of other methods."""
    others = [None, ALL["window-pages"], ALL["h2o"]]
    methods = [ALL[name], ALL[name], *others]

    def asked() -> list[Request]:
        return [
            ask(method, 3 + k, 40, seed=seed + k, sample=k, pool_page=page_size, script=None)
            for k, method in enumerate(methods)
        ]

    together, alone = asked(), asked()
    scheduler = scheduler_for(MassStub(bumpy, num_slots=SLOTS), 96 // page_size, page_size)
    run_all(scheduler, together)
    for request in alone:
        run_all(
            scheduler_for(MassStub(bumpy, num_slots=SLOTS), 96 // page_size, page_size), [request]
        )
    assert [r.recorder.freeze() for r in together] == [r.recorder.freeze() for r in alone]
    assert scheduler.num_preemptions > 0


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "num_prompt", "words"),
    [
        (SlidingWindow(budget=8, page_tokens=9), 3, "budget of 8 cannot hold the 9 tokens"),
        (
            SlidingWindow(budget=12, pin_prompt=True),
            12,
            "12 cannot hold the 13 .* 12 pinned and 1 for",
        ),
        (StreamingLLM(budget=4), 20, "4 cannot hold the 5 .* 4 pinned"),
        (StreamingLLM(budget=9, pin_prompt=True, page_tokens=8), 2, "9 cannot hold the 12 "),
        (PagedH2O(budget=63), 2, "63 cannot hold the 64 .* 0 pinned and 64 for pages of 16"),
        (
            SlidingWindow(budget=0.5, pin_prompt=True),
            50,
            "0.5 of at most 60 tokens comes to 30, .* 51",
        ),
    ],
)
def test_a_budget_that_is_too_small_is_refused_with_both_numbers(
    method: EvictingMethod, num_prompt: int, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        ask(method, num_prompt, 10)


@pytest.mark.parametrize("name", ALL)
def test_the_smallest_budget_works(name: str) -> None:
    from dataclasses import replace

    method = ALL[name]
    least = least_tokens(method, 6)
    request = decoded(replace(method, budget=least), 6, 50)
    assert max(map(len, seen(request))) <= least


def test_an_engine_that_gives_no_attention_is_refused_by_name() -> None:
    scheduler = scheduler_for(StubEngine(96), SLOTS)
    with pytest.raises(Unsupported, match="'paged_h2o,budget=24,page_tokens=4' needs attention"):
        scheduler.submit(ask(ALL["h2o"], 5, 5))
    with pytest.raises(Unsupported, match="needs re-indexed positions, but engine 'stub' has none"):
        scheduler.submit(ask(StreamingLLM(budget=BUDGET, reindexed=True), 5, 5))


@pytest.mark.parametrize("budget", [0, -1, 0.0, 1.5, float("nan"), True, "8", None])
def test_bad_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(InvalidInput, match="whole number of tokens, as 256"):
        Budget(budget)


@pytest.mark.parametrize(
    ("text", "amount"), [("256", 256), ("0.5", 0.5), ("50%", 0.5), ("1.0", 1.0), ("12.5%", 0.125)]
)
def test_budgets_are_read(text: str, amount: float) -> None:
    assert parse_budget(text) == amount
    assert type(parse_budget(text)) is type(amount)


@pytest.mark.parametrize("amount", [1, 10**17, 0.5, 1.0, 1e-05, 0.1 + 0.2, 2.5e-300])
def test_a_budget_is_spelled_as_it_is_read(amount: float) -> None:
    text = spell("window", {"budget": amount, "pin_prompt": True})
    assert read(text) == ("window", {"budget": amount, "pin_prompt": True})
    assert read(SlidingWindow(budget=amount).name)[1] == {"budget": amount}
    assert spell("window", {"budget": 0.00001}) == "window,budget=0.00001"


@pytest.mark.parametrize("text", ["", "x", "-3", "0", "0%", "150%", "1e3", "inf", "٣", "2.5"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="budget of"):
        parse_budget(text)


def test_pinned_variants_differ_from_the_others() -> None:
    """The crossing above would prove nothing if pinning did nothing."""
    for name, method in ALL.items():
        if not method.pin_prompt and method.budget == BUDGET:
            rows = [seen(decoded(m, 6, 60))[-1] for m in (method, pinned(method))]
            assert set(range(6)) <= rows[1], name
            assert rows[0] != rows[1], name
