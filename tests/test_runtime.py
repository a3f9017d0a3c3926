"""Pool, scheduler and requests: isolation, order, budget, stops, preemption, cancellation."""

from __future__ import annotations

import itertools
import random
from collections import Counter
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
    largest_gap,
    make_request,
    one_pass,
    run_all,
    scheduler_for,
    scripted,
)
from stubs import StubEngine
from tiny_lms import tiny_lm

from stretto import SamplingParams
from stretto.bench.program import ForkProgram, drawn_tokens
from stretto.dialects.plain import PlainSession
from stretto.effects import Cut, Fork, Join, Move, Place, Wait
from stretto.engines.hf import HFEngine
from stretto.errors import PromptTooLong
from stretto.lm import LM
from stretto.runtime import events
from stretto.runtime.feed import Feed
from stretto.runtime.memory import RequestMemory
from stretto.runtime.pool import Pool, PoolError, SlotList
from stretto.runtime.request import Request, Script
from stretto.trace import derived_steps

Lengths = tuple[int, ...]


@pytest.fixture(scope="module")
def pasta() -> LM:
    return tiny_lm("pasta")


def promises_script(lm: LM, lengths: Lengths, seed: int = 0, swap: str | None = None) -> Script:
    """Main promises a chunk per length, syncs and goes on; child k draws `lengths[k]` tokens."""
    control, rng = lm.vocabulary.control, random.Random(seed)
    digit = lm.vocabulary.encode("2")
    main = []
    for _ in lengths:
        topic = [rng.randrange(40, 200)]
        main += [control["promise"], *topic, control["tokens"], *digit, control["promise_end"]]
    main += [control["sync"], 50, 51, 52]
    scripts = {"main": main}
    for k, length in enumerate(lengths, 1):
        own = random.Random(f"{seed}/{k}/{swap == f'main.{k}'}")
        scripts[f"main.{k}"] = [own.randrange(40, 200) for _ in range(length)]
        scripts[f"main.{k}"].append(control["async_end"])
    end = next(iter(lm.vocabulary.end_ids))

    def script(thread: str, index: int) -> int | None:
        tokens = scripts[thread]
        return tokens[index] if index < len(tokens) else end

    return script


def decode(lm: LM, script: Script, **params: Any) -> tuple[Any, Recording]:
    """Decodes a scripted answer, keeping every logit row."""
    recording = Recording(lm.engine)
    lm.scheduler.engine = recording
    try:
        stream = lm.submit("hi", SamplingParams(max_tokens=500, **params), script=script)
        stream.finish()
    finally:
        lm.scheduler.engine = lm.engine
    lm.scheduler.check_integrity()
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages
    return stream, recording


def orders(count: int) -> list[Lengths]:
    """Lengths for which `count` forks finish in every order (all of them up to 4 forks)."""
    ranks = list(itertools.permutations(range(count)))
    if count > 4:
        ranks = random.Random(count).sample(ranks, 50)
    # A promise takes five steps, so a fork that starts k promises later must be shorter by 5 k.
    return [tuple(1 + 7 * r + 5 * (count - 1 - k) for k, r in enumerate(rank)) for rank in ranks]


@pytest.mark.parametrize("count", range(1, 9))
def test_forks_may_finish_in_any_order(pasta: LM, count: int) -> None:
    for lengths in orders(count):
        stream, recording = decode(pasta, promises_script(pasta, lengths))
        request = stream.request
        ends = [t.end_step for t in stream.completion.threads if t.parent is not None]
        assert len(set(ends)) == count
        trace = stream.completion.trace
        assert largest_gap(pasta.engine.model, request, recording) < 1e-4
        assert [list(s.steps) for s in trace.segments] == derived_steps(trace)
        sync = max(5 * count + 1, *(5 * k + 1 + n + 1 for k, n in enumerate(lengths, 1)))
        assert stream.completion.usage.sequential_steps >= sync - 1


def test_finish_orders_are_really_all_orders(pasta: LM) -> None:
    found = set()
    for lengths in orders(4):
        stream, _ = decode(pasta, promises_script(pasta, lengths))
        ends = [t.end_step for t in stream.completion.threads[1:]]
        found.add(tuple(sorted(range(4), key=lambda k: ends[k])))
    assert len(found) == 24


def rows_of(stream: Any, recording: Recording) -> dict[tuple[str, int], torch.Tensor]:
    """Logit rows by (thread, index of the token in its thread)."""
    recorder = stream.request.recorder
    starts: dict[int, int] = {}
    for thread in recorder.threads.values():
        at = 0
        for handle in thread.segments:
            starts[handle] = at
            at += len(recorder.segments[handle].tokens)
    return {
        (recorder.segments[handle].thread, starts[handle] + index): row
        for (_, handle, index), row in recording.rows.items()
    }


def test_a_siblings_tokens_do_not_touch_a_fork_but_the_join_does(pasta: LM) -> None:
    lengths = (6, 9, 4)
    base = rows_of(*decode(pasta, promises_script(pasta, lengths)))
    other = rows_of(*decode(pasta, promises_script(pasta, lengths, swap="main.2")))
    assert base.keys() == other.keys()
    changed = {key for key in base if not torch.equal(base[key], other[key])}
    assert {thread for thread, _ in changed} == {"main", "main.2"}
    on_main = sorted(index for thread, index in changed if thread == "main")
    all_main = sorted(index for thread, index in base if thread == "main")
    assert on_main == all_main[-4:]  # the sync and the three tokens after it, nothing before


def test_main_after_a_fork_does_not_touch_the_fork(pasta: LM) -> None:
    script = promises_script(pasta, (12,))
    rows = []
    for extra in (60, 61):

        def varied(thread: str, index: int, extra: int = extra) -> int | None:
            if thread == "main" and index >= 5:
                return [extra, extra, pasta.vocabulary.control["sync"], 50, 2][min(index - 5, 4)]
            return script(thread, index)

        rows.append(rows_of(*decode(pasta, varied, stop_ids=frozenset({2}))))
    assert all(torch.equal(row, rows[1][key]) for key, row in rows[0].items() if key[0] == "main.1")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_steps_measured_are_steps_derived(seed: int) -> None:
    engine = HFEngine(tiny_model("llama"), 512)
    requests = [make_request(seed + k) for k in range(3)]
    run_all(scheduler_for(engine, 512), requests)
    for request in requests:
        trace = request.recorder.freeze()
        measured = max((s for seg in trace.segments for s in seg.steps if s is not None), default=0)
        assert measured == request.step


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), page_size=st.sampled_from([1, 3, 8]))
def test_a_requests_answer_does_not_depend_on_its_neighbours(seed: int, page_size: int) -> None:
    def drawn(num_pages: int, count: int) -> Any:
        engine = HFEngine(tiny_model("qwen2"), 512)
        requests = [make_request(seed + k, script=None) for k in range(count)]
        run_all(scheduler_for(engine, num_pages // page_size, page_size), requests)
        return [[(s.thread, s.tokens) for s in r.recorder.freeze().segments] for r in requests]

    # Sampling is greedy over a tiny random model with wide gaps, so ties are out of the question.
    assert drawn(512, 1) == drawn(512, 4)[:1] == drawn(200, 4)[:1]


def test_preemption_happens_and_changes_nothing() -> None:
    engine = Recording(HFEngine(tiny_model("llama"), 512))
    requests = [make_request(seed, RandomSession(seed, max_length=40)) for seed in range(5)]
    scheduler = scheduler_for(engine, 110)
    run_all(scheduler, requests)
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert request.finish_reason == "stop"
        assert largest_gap(engine.engine.model, request, engine) < 1e-4


def test_the_youngest_is_preempted_and_the_oldest_comes_back_first() -> None:
    engine = StubEngine(96)
    requests = [
        Request(
            [1] * 8,
            PlainSession(),
            SamplingParams(max_tokens=12),
            decode=str,
            end_ids=frozenset(),
            max_positions=50,
            sample=k,
        )
        for k in range(3)
    ]
    scheduler = scheduler_for(engine, 26)
    for request in requests:
        scheduler.submit(request)
    while scheduler.step():
        alive = [r for r in requests if not r.is_done]
        assert [*scheduler.running, *scheduler.waiting] == alive
    assert scheduler.num_preemptions == 3  # the third, the second, and the third again


def test_restoring_differs_from_recomputing_without_the_evicted() -> None:
    """Survivors keep what they absorbed: a pass without the evicted segment gives other logits."""
    model = tiny_model("llama")
    engine = Recording(HFEngine(model, 512))
    session = RandomSession(11, rates={"fork": 0, "join": 0, "evict": 0.5, "cut": 0.5})
    request = make_request(11, session)
    run_all(scheduler_for(engine, 512), [request])
    trace = request.recorder.freeze()
    last = trace.segments[-1]
    dead = {s.id for s in trace.segments} - last.sees - {last.id}
    assert dead
    reference = one_pass(model, trace)
    kept = [s for s in trace.segments if s.id not in dead]
    tokens = torch.tensor([[t for s in kept for t in s.tokens]])
    positions = torch.tensor([[p for s in kept for p in s.positions]])
    with torch.inference_mode():
        recomputed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
    assert float((reference[-1] - recomputed[-1]).abs().max()) > 1e-3


def test_an_evicted_page_is_free_at_once_and_admits_a_waiting_request() -> None:
    engine = HFEngine(tiny_model("llama"), 64)
    scheduler = scheduler_for(engine, 64)
    session = RandomSession(0, max_length=100, rates={"fork": 0, "join": 0, "evict": 1, "cut": 0})
    request = make_request(0, session)
    scheduler.submit(request)
    held = []
    while scheduler.step():
        scheduler.check_integrity()
        held.append(request.memory.num_pages)
    assert (
        max(held[1:-1])
        < request.num_prompt_tokens + 10
        < sum(len(s.tokens) for s in request.recorder.segments)
    )


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers() -> None:
    engine = HFEngine(tiny_model("llama"), 600)
    scheduler = scheduler_for(engine, 5)
    request = make_request(1)
    request.num_prompt_tokens = 6
    with pytest.raises(PromptTooLong, match=r"6 KV slots but the pool has 5"):
        scheduler.submit(request)
    request.num_prompt_tokens = 512
    with pytest.raises(PromptTooLong, match=r"512 tokens but the model has 512 positions"):
        scheduler.submit(request)


def test_a_response_that_outgrows_the_pool_ends_with_length() -> None:
    engine = HFEngine(tiny_model("llama"), 64)
    requests = [make_request(k, PlainSession()) for k in range(3)]
    run_all(scheduler_for(engine, 30), requests)
    for request in requests:
        assert request.finish_reason == "length"
        assert sum(len(s.tokens) for s in request.recorder.segments) in (30, 31)


def test_the_last_position_ends_a_thread() -> None:
    engine = HFEngine(tiny_model("llama"), 600)
    request = make_request(2, PlainSession(), max_positions=40)
    run_all(scheduler_for(engine, 600), [request])
    positions = [p for s in request.recorder.segments for p in s.positions]
    assert positions == list(range(40))
    assert request.finish_reason == "length"


def test_a_child_that_begins_at_the_last_position_ends_there(pasta: LM) -> None:
    """Positions run from 448 (512 - 64) after the first promise, so that the second one's last
    token stands at 510 and its child's `<async>` at 511, the last position."""
    control, encode = pasta.vocabulary.control, pasta.vocabulary.encode
    head, tail = [control["promise"], control["tokens"]], [control["promise_end"]]
    main = [*head, *encode("205"), *tail, *[50] * 59, *head, *encode("1"), *tail, 51]
    scripts = {"main": main, "main.1": [control["async_end"]], "main.2": [52, 53]}
    stream = pasta.submit(
        "hi", SamplingParams(max_tokens=500), script=lambda t, i: (scripts[t] + [54] * 99)[i]
    )
    done = stream.finish()
    assert done.trace.of_thread("main")[-2].positions[-1] == 510
    (child,) = done.trace.of_thread("main.2")
    assert child.tokens == (control["async"], control["async_end"])
    assert child.origins == ("injected", "injected")
    assert child.positions == (511, 511)
    assert [t.finish_reason for t in done.threads] == ["length", "stop", "length"]
    assert done.threads[2].start_step is None
    assert done.usage.capped_threads == 1
    assert done.trace.of_thread("main")[-1].tokens == (51,)
    pasta.scheduler.check_integrity()


@pytest.mark.parametrize("budget", [1, 2, 7, 8, 12, 13, 14, 30])
def test_the_budget_is_charged_in_thread_order_and_hit_exactly(pasta: LM, budget: int) -> None:
    script = promises_script(pasta, (20, 20))
    stream = pasta.submit("hi", SamplingParams(max_tokens=budget), script=script)
    done = stream.finish()
    assert sum(t.num_tokens for t in done.threads) == budget
    assert done.finish_reason == "length"
    assert {t.finish_reason for t in done.threads} == {"length"}
    pasta.scheduler.check_integrity()


class Nested(RandomSession):
    """Main forks a child and waits for it, which forks one of its own and waits for that."""

    def feed(self, recorder: Any, thread: Any, token: int) -> list[Move]:
        if thread.num_drawn != 1 or thread.name.count(".") == 2:
            return [Place(token)]
        child = f"{thread.name}.1"
        fork = Fork(child, (1,), resume=thread.next_position + 5)
        return [Place(token), fork, Wait((child,)), Join((child,))]


@pytest.mark.parametrize("steps", [3, 6])
def test_waits_within_waits_end_with_their_request(steps: int) -> None:
    scheduler = scheduler_for(StubEngine(vocab_size=96), 128)
    doomed, other = make_request(1, Nested(1)), make_request(2, PlainSession())
    for request in (doomed, other):
        scheduler.submit(request)
    for _ in range(steps):
        scheduler.step()
    scheduler.cancel(doomed)
    scheduler.check_integrity()
    assert doomed.finish_reason == "cancelled"
    assert not any(t.is_open for t in doomed.recorder.threads.values())
    assert not other.is_done


def test_cancelling_frees_slots_at_once_and_leaves_the_others_alone(pasta: LM) -> None:
    script = promises_script(pasta, (20, 20))
    params = SamplingParams(max_tokens=100)
    alone = pasta.submit("hi", params, script=script).finish()
    doomed = pasta.submit("hi there", params, script=script)
    other = pasta.submit("hi", params, script=script)
    for _ in range(15):
        pasta.step(other.request)
    held = doomed.request.memory.num_pages
    free = pasta.scheduler.pool.num_free_pages
    doomed.close()
    assert held
    assert pasta.scheduler.pool.num_free_pages == free + held
    pasta.scheduler.check_integrity()
    assert doomed.completion.finish_reason == "cancelled"
    assert other.finish().text == alone.text


def test_a_stream_that_is_dropped_is_cancelled_by_the_next_pass(pasta: LM) -> None:
    import gc

    params = SamplingParams(max_tokens=100)
    request = pasta.submit("hi", params, script=promises_script(pasta, (20, 20))).request
    assert request.is_abandoned or gc.collect() >= 0
    assert pasta.generate("hi", SamplingParams(max_tokens=3))[0].usage.completion_tokens == 3
    assert request.finish_reason == "cancelled"
    pasta.scheduler.check_integrity()
    assert pasta.scheduler.pool.num_free_pages == pasta.scheduler.pool.num_pages


def test_python_threads_share_batches_and_get_their_own_answers(pasta: LM) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [f"question {k}" for k in range(8)]
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    alone = [pasta.generate(p, params, method="sequential")[0].text for p in prompts]

    def ask(prompt: str) -> str:
        return pasta.generate(prompt, params, method="sequential")[0].text

    with ThreadPoolExecutor(8) as workers:
        assert list(workers.map(ask, prompts)) == alone
    pasta.scheduler.check_integrity()


def test_an_engine_that_fails_leaves_no_slots_taken(pasta: LM) -> None:
    class Broken(Recording):
        def forward(self, runs: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

    stream = pasta.submit("hi")
    pasta.scheduler.engine = Broken(pasta.engine)
    with pytest.raises(RuntimeError, match="out of memory"):
        stream.finish()
    pasta.scheduler.engine = pasta.engine
    assert stream.request.is_done
    assert stream.request.finish_reason == "error"
    pasta.scheduler.check_integrity()
    assert pasta.scheduler.pool.num_free_pages == pasta.scheduler.pool.num_pages
    assert pasta.generate("hi", SamplingParams(max_tokens=2))[0].finish_reason == "length"


class Failing(Recording):
    """Fails in what it does for the request whose memory or handle is `target`."""

    target: Any = None

    def forward(self, runs: Any) -> torch.Tensor:
        if any(run.view.memory is self.target for run in runs):
            raise RuntimeError("no such kernel")
        return super().forward(runs)

    def copy_out(self, slots: list[int]) -> Any:
        raise MemoryError

    def copy_in(self, slots: list[int], kept: Any) -> None:
        raise RuntimeError("lost")


def test_a_failure_is_told_to_its_own_request_alone(pasta: LM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=2)
    alone = pasta.generate("sound", params, method="sequential")[0].text
    doomed, sound = (pasta.submit(p, params, method="sequential") for p in ("doomed", "sound"))
    pasta.scheduler.engine = engine = Failing(pasta.engine)
    engine.target = doomed.request.memory
    try:
        assert sound.finish().text == alone  # whose passes the other one failed in
    finally:
        pasta.scheduler.engine = pasta.engine
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such kernel"):
            doomed.finish()
    with pytest.raises(RuntimeError, match="no such kernel"):
        list(doomed)
    assert doomed.completion.finish_reason == "error"
    assert sound.request.failure is None
    pasta.scheduler.check_integrity()
    assert pasta.scheduler.pool.num_free_pages == pasta.scheduler.pool.num_pages


@pytest.mark.parametrize("shares_prompts", [False, True])
@pytest.mark.parametrize("where", ["copy_out", "copy_in"])
def test_a_preemption_that_fails_is_the_preempted_ones(where: str, shares_prompts: bool) -> None:
    def make() -> list[Request]:
        requests = [make_request(seed, PlainSession()) for seed in (0, 1)]
        for request in requests:
            request.params = SamplingParams(max_tokens=60)
        return requests

    told = make()
    run_all(scheduler_for(StubEngine(200), 200), told)
    older, younger = make()
    engine = Failing(StubEngine(100))
    if where == "copy_in":
        engine.copy_out = engine.engine.copy_out
    scheduler = scheduler_for(engine, 100, shares_prompts=shares_prompts)
    scheduler.submit(older)
    scheduler.submit(younger)
    while scheduler.step():
        scheduler.check_integrity()
    assert (older.text, older.finish_reason) == (told[0].text, "length")
    assert younger.error == ("MemoryError" if where == "copy_out" else "lost")
    assert scheduler.pool.num_free_pages == 100
    (_, again) = make()
    run_all(scheduler, [again])
    assert again.text == told[1].text  # nothing was taken over that had been lost


def test_a_request_that_cannot_even_end_harms_no_other() -> None:
    """Its session fails when it is cut off, and its engine before that."""

    class Stubborn(PlainSession):
        def cut_off(self, recorder: Any, thread: Any) -> list[Move]:
            raise RuntimeError("no end")

    told, sound = make_request(1, PlainSession()), make_request(1, PlainSession())
    run_all(scheduler_for(StubEngine(1200), 1200), [told])
    broken, gone = make_request(0, Stubborn()), make_request(2, Stubborn())
    engine = Failing(StubEngine(1200))
    scheduler = scheduler_for(engine, 1200)
    for request in (broken, gone, sound):
        scheduler.submit(request)
    for _ in range(3):
        scheduler.step()
    gone.is_abandoned = True
    engine.target = broken.memory
    while scheduler.step():
        scheduler.check_integrity()
    assert sound.text == told.text
    assert broken.error == "no such kernel"
    assert gone.error == "no end"
    assert scheduler.pool.num_free_pages == 1200


def test_a_long_prompt_is_fed_in_chunks_with_the_same_answer() -> None:
    lm = tiny_lm()
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    params = SamplingParams(max_tokens=12)
    whole = lm.generate(prompt, params)[0]
    lm.scheduler.max_rows = 7
    chunked = lm.generate(prompt, params)[0]
    assert [s.tokens for s in whole.trace.segments] == [s.tokens for s in chunked.trace.segments]
    assert chunked.usage.sequential_steps == whole.usage.sequential_steps


def test_a_request_brings_as_many_rows_to_a_pass_as_it_may() -> None:
    engine = StubEngine(96)
    request = make_request(0, PlainSession(), max_positions=60)
    request_rows = []
    scheduler = scheduler_for(engine, 60, max_rows=4)
    scheduler.submit(request)
    while scheduler.step():
        request_rows.append(engine.num_rows - sum(request_rows))
    length = request.num_prompt_tokens
    chunks = [4] * (length // 4) + [length % 4] * bool(length % 4)
    assert request_rows[: len(chunks) + 1] == [*chunks, 1]
    assert engine.num_logit_rows == request.num_drawn


def test_only_the_row_that_a_thread_draws_from_gives_logits() -> None:
    class Cutting(PlainSession):
        def feed(self, recorder: Any, thread: Any, token: int) -> list[Move]:
            return [Place(token), Cut(), Place(5, "injected")]

    engine = StubEngine(96)
    request = make_request(0, Cutting())
    request.params = SamplingParams(max_tokens=4)
    run_all(scheduler_for(engine, 100), [request])
    assert engine.num_logit_rows == request.num_drawn == 4


def test_the_log_probability_is_of_temperature_one_under_the_mask() -> None:
    banned = np.zeros(96, dtype=np.bool_)
    banned[10:] = True
    engine = Recording(StubEngine(96))
    request = make_request(0, PlainSession(banned), script=None)
    request.params = SamplingParams(max_tokens=6, temperature=0.5, top_k=3, repetition_penalty=2)
    run_all(scheduler_for(engine, 100), [request])
    tokens = [e for e in request.log.events if isinstance(e, events.Token)]
    assert len(tokens) == 6
    for token, logits in zip(tokens, engine.rows.values(), strict=True):
        expected = torch.log_softmax(logits[:10], dim=-1)[token.token]
        assert token.logprob == pytest.approx(float(expected), abs=1e-6)


def test_the_repetition_penalty_is_over_the_response_that_a_thread_sees() -> None:
    class Same(StubEngine):
        def forward(self, runs: Any) -> torch.Tensor:
            return torch.tensor([3.0, 2.0, 1.9]).expand(len(super().forward(runs)), 3)

    class Forking(PlainSession):
        def feed(self, recorder: Any, thread: Any, token: int) -> list[Move]:
            is_first = thread.parent is None and thread.num_drawn == 1
            forks = [Fork(f"main.{k}", (2,)) for k in (1, 2)] if is_first else []
            return [Place(token), *forks]

    request = Request(
        [0, 1, 2],
        Forking(),
        SamplingParams(max_tokens=4, repetition_penalty=2),
        decode=str,
        end_ids=frozenset(),
        max_positions=50,
    )
    run_all(scheduler_for(Same(3), 100), [request])
    drawn = {n: drawn_tokens(request, n) for n in request.recorder.threads}
    # The prompt counts for nothing, main's 0 for all, an injected 2 for its own thread.
    assert drawn == {"main": [0, 1], "main.1": [1], "main.2": [1]}


def test_a_stop_string_is_found_as_soon_as_its_last_character_is_drawn() -> None:
    tokens = [ord(c) - 32 for c in "one END two"]
    request = make_request(
        0,
        PlainSession(),
        decode=lambda ids: "".join(chr(i + 32) for i in ids),
        script=lambda thread, index: tokens[index],
    )
    request.params = SamplingParams(max_tokens=11, stop=("D t", "END"))
    run_all(scheduler_for(StubEngine(96), 100), [request])
    assert (request.text, request.num_drawn, request.finish_reason) == ("one ", 7, "stop")


def test_a_stop_string_in_text_that_settles_at_the_end_cuts_it_too() -> None:
    """Main's `END` stands behind a child that never ends, so it settles with the last step."""

    class Forking(PlainSession):
        def feed(self, recorder: Any, thread: Any, token: int) -> list[Move]:
            is_first = thread.parent is None and thread.num_drawn == 1
            return [Place(token), *([Fork("main.1", (ord("x") - 32,))] if is_first else [])]

    texts = {"main": "aENDb", "main.1": "yyyyyyy"}
    request = make_request(
        0,
        Forking(),
        decode=lambda ids: "".join(chr(i + 32) for i in ids),
        script=lambda thread, index: ord(texts[thread][index]) - 32,
    )
    request.params = SamplingParams(max_tokens=9, stop=("END",))
    run_all(scheduler_for(StubEngine(96), 100), [request])
    assert request.num_drawn == 9
    assert (request.text, request.finish_reason) == ("ayyyy", "stop")


def test_the_end_of_main_comes_after_its_childrens(pasta: LM) -> None:
    script = promises_script(pasta, (6, 3))
    sync = pasta.vocabulary.control["sync"]
    end = next(iter(pasta.vocabulary.end_ids))

    def without_sync(thread: str, index: int) -> int | None:
        token = script(thread, index)
        return end if token == sync else token

    stream = pasta.submit("hi", SamplingParams(max_tokens=60), script=without_sync)
    stream.finish()
    ends = [e.thread for e in stream.request.log.events if isinstance(e, events.ThreadEnd)]
    assert sorted(ends[:2]) == ["main.1", "main.2"]
    assert ends[2:] == ["main"]


def test_an_event_has_the_step_and_the_log_probability_of_the_draw(pasta: LM) -> None:
    """Also where a wait held the token back: the sync is drawn at step 6 and placed later. The
    child draws an end, for which its `</async>` is injected."""
    script, async_end = promises_script(pasta, (12,)), pasta.vocabulary.control["async_end"]
    end = next(iter(pasta.vocabulary.end_ids))

    def ending(thread: str, index: int) -> int | None:
        token = script(thread, index)
        return end if token == async_end else token

    stream, _ = decode(pasta, ending)
    for name, thread in stream.request.recorder.threads.items():
        segments = [stream.request.recorder.segments[h] for h in thread.segments]
        steps = [s for seg in segments if seg.role != "prompt" for s in seg.steps]
        tokens = [
            e for e in stream.request.log.events if isinstance(e, events.Token) and e.thread == name
        ]
        drawn = [e.origin == "sampled" for e in tokens]
        assert [e.step if d else None for e, d in zip(tokens, drawn, strict=True)] == steps
        assert [e.logprob is not None for e in tokens] == drawn
        if name == "main":
            assert tokens[5].token == pasta.vocabulary.control["sync"]
            assert tokens[5].step == 6 < tokens[6].step - 1


def test_a_token_that_begins_where_a_stop_string_cuts_is_cut() -> None:
    lm = tiny_lm()
    ids = lm.vocabulary.encode("one END two")
    starts = [len(lm.vocabulary.decode(ids[:i])) for i in range(len(ids))]
    at = len("one ")
    assert at in starts
    params = SamplingParams(max_tokens=len(ids), stop="END")
    done = lm.submit("hi", params, script=lambda _, i: ids[i]).finish()
    num_drawn = done.threads[0].num_tokens
    assert done.text == "one "
    assert done.usage.completion_tokens == sum(start < at for start in starts)
    assert done.usage.cut_tokens == num_drawn - done.usage.completion_tokens > 0


def test_a_cap_ends_a_scripted_thread_too(pasta: LM) -> None:
    control = pasta.vocabulary.control
    digit = pasta.vocabulary.encode("2")
    main = [control["promise"], control["tokens"], *digit, control["promise_end"], control["sync"]]
    scripts = {"main": main, "main.1": []}
    params = SamplingParams(max_tokens=12, max_thread_tokens=3)
    done = pasta.submit("hi", params, script=lambda t, i: (scripts[t] + [50] * 99)[i]).finish()
    (child,) = done.trace.of_thread("main.1")
    assert child.tokens == (control["async"], 50, 50, control["async_end"])
    assert child.origins == ("injected", "sampled", "sampled", "forced")
    assert done.threads[1].finish_reason == "length"


def test_pool_books() -> None:
    pool = Pool(4, 3)
    a, b = SlotList(), SlotList()
    assert pool.extend(a, 4) == [0, 1, 2, 3]
    assert pool.extend(b, 1) == [6]
    assert pool.pages_to_extend(a, 2) == 0
    assert pool.pages_to_extend(a, 3) == 1
    pool.check_integrity()
    with pytest.raises(PoolError, match="free"):
        pool.extend(b, 7)
    pool.free(a)
    assert pool.num_free_pages == 3
    pool.check_integrity()
    b.pages.append(0)
    with pytest.raises(PoolError):
        pool.check_integrity()


def test_what_a_request_held_outlives_what_it_gives_back() -> None:
    memory, pool = RequestMemory(), Pool(10)
    assert memory.mean_pages == 0
    memory.extend(pool, [{0: 3}])
    memory.free(pool, [0])
    memory.extend(pool, [{1: 1}])
    assert (memory.num_pages, memory.peak_pages) == (1, 3)
    assert memory.mean_pages == 2  # 3 in one pass, 1 in the next


def test_scripted_helper_is_deterministic() -> None:
    assert scripted(1)("main", 3) == scripted(1)("main", 3)


def forked(
    num_threads: int, num_tokens: int, decode: Any = lambda ids: "x" * len(ids), **params: Any
) -> Request:
    """Main draws a token and forks; each thread draws its own."""
    return Request(
        [1] * 5,
        ForkProgram([range(2, 2 + num_threads)], num_tokens),
        SamplingParams(max_tokens=1 + num_threads * num_tokens, **params),
        decode=decode,
        end_ids=frozenset(),
        max_positions=200,
    )


def test_the_work_of_a_pass_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unfed is looked for once a pass, and an id is decoded once a request."""
    calls: Counter[str] = Counter()
    real = Feed._find_rows

    def found(self: Feed, limit: int) -> Any:
        calls["find rows"] += 1
        return real(self, limit)

    def decode(ids: Any) -> str:
        calls["decode"] += 1
        return "x" * len(ids)

    monkeypatch.setattr(Feed, "_find_rows", found)
    engine = StubEngine(8)
    request = forked(6, 20, decode=decode, stop=("xy",))
    run_all(scheduler_for(engine, 300), [request])
    assert request.num_drawn == 121
    assert engine.num_passes == 21
    assert calls["find rows"] == engine.num_passes
    assert calls["decode"] <= engine.vocab_size


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    how=st.sampled_from([{}, {"top_p": 0.8}, {"top_k": 5}, {"repetition_penalty": 1.3}]),
    num_pages=st.sampled_from([600, 90]),
)
def test_a_draw_does_not_depend_on_the_rows_beside_it(
    seed: int, how: dict[str, float], num_pages: int
) -> None:
    """Bit for bit, log-probabilities included, on an engine whose rows are the same."""

    def told(count: int) -> list[Any]:
        requests = [forked(k + 1, 9, temperature=0.9, seed=seed, **how) for k in range(count)]
        run_all(scheduler_for(StubEngine(300), num_pages), requests)
        return [e for e in requests[0].log.events if isinstance(e, events.Token)]

    assert told(1) == told(5)
