"""Dialect apar while decoding: masks, threads, freed pages, and the master property."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from apar_words import CHILD, EMPTY, EOS, FORK, SPARE, TEXT_IDS, VOCABULARY, A, B
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import Recording, largest_gap, run_all, scheduler_for
from stubs import StubEngine
from test_lm import document
from tiny_lms import tiny_lm

from stretto import LM, SamplingParams
from stretto.dialects.apar import AparMasks, AparSession, AparSettings
from stretto.dialects.apar_text import parse_ids, parse_text, to_ids, to_text
from stretto.effects import Fork, Place
from stretto.engines.hf import HFEngine
from stretto.recorder import MAIN, Recorder
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler
from stretto.trace import Trace, derived_steps

Script = Callable[[str, int], int | None]
MASKS = AparMasks(VOCABULARY)
PROMPT = [A, B]


def scripted(**scripts: list[int]) -> Script:
    """Each thread's drawn tokens (`c1` is main.1, `c1_2` main.1.2), then ends of sequence."""
    names = {k: "main" + k[1:].replace("_", ".") for k in scripts if k != "main"}
    names = {k: v.replace("main", "main.") for k, v in names.items()} | {"main": "main"}
    written = {names[k]: v for k, v in scripts.items()}
    return lambda thread, index: [*written.get(thread, []), *[EOS] * (index + 1)][index]


def request_of(
    script: Script, how: AparSettings | None = None, *, params: SamplingParams | None = None,
    max_positions: int = 512, max_forks: int = 64,
) -> Request:  # fmt: skip
    return Request(
        PROMPT,
        AparSession(MASKS, how or AparSettings(), max_forks=max_forks),
        params or SamplingParams(max_tokens=400),
        decode=VOCABULARY.decode,
        end_ids=VOCABULARY.end_ids,
        max_positions=max_positions,
        script=script,
    )


def decode(request: Request, num_pages: int = 300, page_size: int = 1) -> Trace:
    engine = StubEngine(VOCABULARY.size, num_slots=num_pages * page_size)
    run_all(Scheduler(engine, Pool(num_pages, page_size)), [request])
    return request.recorder.freeze()


def shape(trace: Trace) -> list[tuple[object, ...]]:
    return [
        (s.thread, s.role, s.sees, s.tokens, s.positions, s.origins, s.markup)
        for s in trace.segments
    ]


# -- threads ---------------------------------------------------------------------------------------


def test_a_child_goes_on_from_its_fork_and_nobody_sees_it() -> None:
    request = request_of(scripted(main=[A, FORK, B, FORK, B, B], c1=[A, A, A], c2=[B]))
    trace = decode(request)
    assert [(s.thread, sorted(s.sees), s.tokens, s.positions) for s in trace.segments] == [
        ("main", [], (A, B), (0, 1)),
        ("main", [0], (A, FORK), (2, 3)),
        ("main.1", [0, 1], (CHILD, A, A, A), (4, 5, 6, 7)),
        ("main", [0, 1], (B, FORK), (4, 5)),
        ("main.2", [0, 1, 3], (CHILD, B), (6, 7)),
        ("main", [0, 1, 3], (B, B), (6, 7)),
    ]
    assert request.text == " a a a a b b b b"
    assert request.finish_reason == "stop"
    assert [(t.name, t.parent, t.finish_reason) for t in trace.threads] == [
        ("main", None, "stop"),
        ("main.1", "main", "stop"),
        ("main.2", "main", "stop"),
    ]
    # Child 1 starts at step 3 and draws 3 tokens; main draws 6: nobody waits for anybody.
    assert [list(s.steps) for s in trace.segments] == derived_steps(trace)
    assert trace.critical_path_steps == 6


def test_the_answer_is_over_when_the_last_child_is() -> None:
    request = request_of(scripted(main=[A, FORK], c1=[B] * 9))
    trace = decode(request)
    assert trace.critical_path_steps == 2 + 9
    assert request.finish_reason == "stop"
    assert request.text == " a" + " b" * 9


def test_an_answer_without_forks_is_plain_decoding() -> None:
    trace = decode(request_of(scripted(main=[A, B, A])))
    assert [(s.tokens, s.positions) for s in trace.response] == [((A, B, A), (2, 3, 4))]
    assert trace.parallelism == 1.0


def test_an_empty_child_and_an_empty_answer() -> None:
    trace = decode(request_of(scripted(main=[FORK])))
    assert [s.tokens for s in trace.response] == [(FORK,), (CHILD,)]
    assert decode(request_of(scripted(main=[]))).num_tokens == 0


def test_the_moves_of_a_fork() -> None:
    recorder = Recorder(PROMPT, MAIN)
    session = AparSession(MASKS, AparSettings())
    moves = session.feed(recorder, recorder.threads[MAIN], FORK)
    assert moves == [Place(FORK, markup=True), Fork("main.1", inject=(CHILD,), joins=False)]


def test_a_child_of_a_child_where_the_depth_allows() -> None:
    script = scripted(main=[A, FORK, B], c1=[A, FORK, B], c1_1=[A])
    trace = decode(request_of(script, AparSettings(max_depth=3)))
    assert [t.name for t in trace.threads] == ["main", "main.1", "main.1.1"]
    assert [list(s.steps) for s in trace.segments] == derived_steps(trace)
    assert trace.critical_path_steps == 5
    assert decode(request_of(script)).threads[-1].name == "main.1"


def test_caps_and_the_last_position_end_a_thread_with_length() -> None:
    params = SamplingParams(max_tokens=400, max_thread_tokens=2)
    trace = decode(request_of(scripted(main=[FORK, A], c1=[B] * 5), params=params))
    assert [t.finish_reason for t in trace.threads] == ["stop", "length"]
    assert trace.segments[2].tokens == (CHILD, B, B)
    trace = decode(request_of(scripted(main=[A, FORK, A], c1=[B] * 9), max_positions=8))
    assert [t.finish_reason for t in trace.threads] == ["stop", "length"]
    assert trace.segments[2].positions == (4, 5, 6, 7)


def test_a_stop_string_waits_for_the_child_before_it() -> None:
    params = SamplingParams(max_tokens=400, stop=(" b a",))
    request = request_of(scripted(main=[A, FORK, A, A], c1=[A, A, B]), params=params)
    decode(request)
    assert request.text == " a a a"
    assert request.finish_reason == "stop"


# -- pages -----------------------------------------------------------------------------------------


def pages_of(request: Request, handle: int) -> list[int]:
    slots = request.memory.slots.get(handle)
    return [] if slots is None else list(slots.pages)


@pytest.mark.parametrize("page_size", [1, 2])
def test_pages_of_a_child_are_free_in_the_pass_that_ends_it(page_size: int) -> None:
    request = request_of(scripted(main=[A, FORK, *[B] * 12], c1=[A] * 5))
    engine = StubEngine(VOCABULARY.size, num_slots=200)
    scheduler = Scheduler(engine, Pool(100 // page_size, page_size))
    scheduler.submit(request)
    ended_at, lent = None, set[int]()
    while scheduler.step():
        scheduler.check_integrity()
        child = request.recorder.threads.get("main.1")
        if child is not None and child.is_open:
            lent.update(p for h in child.segments for p in pages_of(request, h))
        elif ended_at is None and child is not None:
            ended_at = request.step
            assert not any(pages_of(request, h) for h in child.segments)
            main = request.recorder.threads[MAIN].segments
            assert request.memory.num_pages == sum(len(pages_of(request, h)) for h in main)
        if scheduler.running:
            last = pages_of(request, request.recorder.threads[MAIN].own.handle)
    # The fork is drawn at step 2, five tokens at 3 to 7, and the end of sequence at 8.
    assert ended_at == 8
    assert lent & set(last)
    assert scheduler.pool.num_free_pages == scheduler.pool.num_pages


def test_what_only_main_saw_is_free_when_main_ends_before_its_child() -> None:
    request = request_of(scripted(main=[A, FORK, B, B, B], c1=[A] * 20))
    scheduler = Scheduler(StubEngine(VOCABULARY.size, num_slots=100), Pool(100, 1))
    scheduler.submit(request)
    while request.recorder.threads[MAIN].is_open:
        scheduler.step()
    child = request.recorder.threads["main.1"]
    seen = sum(len(request.recorder.segments[h].tokens) for h in child.sees)
    assert seen == len(PROMPT) + 2
    assert request.memory.num_pages == seen + len(child.own.tokens) - len(child.unfed)
    while scheduler.step():
        scheduler.check_integrity()
    assert scheduler.pool.num_free_pages == 100


# -- masks -----------------------------------------------------------------------------------------


def legal_at(
    thread: str, index: int, script: Script, how: AparSettings, **options: int
) -> set[int]:
    """What is legal for a thread's drawn token `index`."""
    request = request_of(script, how, **options)  # type: ignore[arg-type]
    found: set[int] = set()
    inner = request.session.legal

    def legal(recorder: Recorder, of: Any) -> Any:
        answer = inner(recorder, of)
        assert answer is not None
        if (of.name, of.num_drawn) == (thread, index):
            found.update(np.flatnonzero(answer.mask).tolist())
        return answer

    request.session.legal = legal  # type: ignore[method-assign]
    decode(request)
    return found


GOING_ON = TEXT_IDS | {EOS}
SCRIPT = scripted(main=[A, FORK, B, FORK, A], c1=[A, B, A], c2=[A])


@pytest.mark.parametrize(
    ("thread", "index", "may_fork"),
    [
        ("main", 0, True),
        ("main", 1, True),
        ("main", 2, False),  # right after a fork
        ("main", 3, True),
        ("main", 4, False),
        ("main", 5, True),
        ("main.1", 0, False),  # right after its start
        ("main.1", 1, False),  # too deep
    ],
)
def test_what_is_legal_by_the_published_rules(thread: str, index: int, may_fork: bool) -> None:
    expected = GOING_ON | {FORK} if may_fork else GOING_ON
    assert legal_at(thread, index, SCRIPT, AparSettings()) == expected


def test_what_is_legal_under_other_settings() -> None:
    assert FORK in legal_at("main.1", 1, SCRIPT, AparSettings(max_depth=3))
    assert FORK not in legal_at("main.1", 0, SCRIPT, AparSettings(max_depth=3))
    assert FORK not in legal_at("main", 0, SCRIPT, AparSettings(max_depth=1))
    # Two threads are open at main's index 3, since child 1 draws until then.
    assert FORK not in legal_at("main", 3, SCRIPT, AparSettings(max_threads=2))
    quick = scripted(main=[A, FORK, B, B, B])
    assert FORK in legal_at("main", 4, quick, AparSettings(max_threads=2))
    assert FORK not in legal_at("main", 4, quick, AparSettings(), max_forks=1)


def test_neither_spare_ids_nor_ids_without_text_nor_a_childs_start_are_ever_legal() -> None:
    for mask in (MASKS.forking.mask, MASKS.going_on.mask):
        assert not mask[[CHILD, EMPTY, SPARE]].any()


def test_the_published_limit_of_open_threads() -> None:
    """A fork at every other token, and children that never end: 31 of them, and no more."""

    def script(thread: str, index: int) -> int | None:
        return [A, FORK][index % 2] if thread == MAIN else B

    params = SamplingParams(max_tokens=3000)
    request = request_of(script, params=params)
    trace = decode(request, num_pages=4000)
    assert len(trace.threads) == 32
    assert {code for code, _ in request.session.issues} == {"too-many-forks"}


# -- what holds for every run ----------------------------------------------------------------------


def hostile(seed: int, p_illegal: float = 1.0) -> Script:
    """Any ids, forks and starts of children above all, with stretches left to the sampler."""
    written: dict[str, list[int | None]] = {}

    def script(thread: str, index: int) -> int | None:
        if thread not in written:
            rng = random.Random(f"{seed}/{thread}")
            choices = [[FORK], [A, FORK], [B, B], [None] * 3]
            if rng.random() < p_illegal:
                choices += [[FORK, FORK], [CHILD], [rng.randrange(VOCABULARY.size)]]
            written[thread] = [t for _ in range(60) for t in rng.choice(choices)]
        tokens = written[thread]
        return tokens[index % len(tokens)]

    return script


def hostile_request(seed: int, max_positions: int) -> Request:
    rng = random.Random(seed)
    params = SamplingParams(
        max_tokens=rng.choice([1, 5, 30, 120]),
        temperature=rng.choice([0.0, 0.7, 5.0]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        stop=rng.choice([(), (), (" b a",), ("<child>",)]),
        stop_ids=frozenset(rng.choice([(), (), (5,)])),
        seed=seed,
        max_thread_tokens=rng.choice([None, 3]),
    )
    how = AparSettings(rng.choice([1, 2, 4]), rng.choice([2, 32]))
    return request_of(
        hostile(seed), how, params=params, max_positions=max_positions,
        max_forks=rng.choice([0, 2, 64]),
    )  # fmt: skip


@pytest.mark.parametrize("part", range(4))
def test_random_streams_end_and_leave_the_pool_as_it_was(part: int) -> None:
    rng = random.Random(part)
    for batch in range(8):
        page_size = rng.choice([1, 2, 7])
        num_pages = rng.choice([60, 150, 700]) // page_size
        engine = StubEngine(VOCABULARY.size, num_slots=num_pages * page_size)
        scheduler = Scheduler(engine, Pool(num_pages, page_size))
        seeds = range(part * 1000 + batch * 25, part * 1000 + batch * 25 + 25)
        requests = [hostile_request(seed, rng.choice([24, 100, 512])) for seed in seeds]
        run_all(scheduler, requests, limit=50_000)
        for request in requests:
            check_finished(request)


def check_finished(request: Request) -> None:
    assert request.finish_reason in ("stop", "length")
    assert all(not t.is_open for t in request.recorder.threads.values())
    annotated = request.session.annotated(request.recorder)
    assert annotated is not None
    tags = ("<fork/>", "<child>")
    assert all(annotated[0].startswith(tags, issue.at) for issue in annotated[1])
    trace = request.recorder.freeze()
    assert [list(s.steps) for s in trace.response] == derived_steps(trace)[1:]
    starts = [
        origin
        for s in trace.response
        for token, origin, markup in zip(s.tokens, s.origins, s.markup, strict=True)
        if token == CHILD and markup
    ]
    assert starts == ["injected"] * (len(trace.threads) - 1)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 4))
def test_legal_runs_have_no_issues_and_parse_to_the_same_trace(
    seed: int, budget: int, depth: int
) -> None:
    how = AparSettings(max_depth=depth)
    params = SamplingParams(max_tokens=budget, temperature=2.0, seed=seed)
    request = request_of(lambda *_: None, how, params=params)
    trace = decode(request, num_pages=900)
    annotated = request.session.annotated(request.recorder)
    assert annotated == (to_text(trace, VOCABULARY)[0], ())
    for parsed in (
        parse_ids(PROMPT, to_ids(trace, EOS), VOCABULARY, how),
        parse_text(annotated[0], VOCABULARY, how, VOCABULARY.decode(PROMPT)),
    ):
        assert parsed.text == request.text
        assert not parsed.issues
        assert shape(parsed.trace) == shape(trace)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), page_size=st.sampled_from([1, 4]))
def test_stepwise_logits_equal_one_masked_pass(kind: str, seed: int, page_size: int) -> None:
    """The master property over answers of this dialect."""
    model = tiny_model(kind)
    engine = Recording(HFEngine(model, 512))
    how = AparSettings(max_depth=1 + seed % 3)
    params = SamplingParams(max_tokens=60)
    requests = [request_of(hostile(seed + k, 0.0), how, params=params) for k in range(2)]
    run_all(scheduler_for(engine, 512 // page_size, page_size), requests)
    for request in requests:
        assert largest_gap(model, request, engine) < 1e-4


# -- through LM ------------------------------------------------------------------------------------


def forced(lm: LM, main: list[str], *children: str) -> Script:
    """Main writes pieces with a fork after each but the last, children theirs, then they end."""
    encode, control = lm.vocabulary.encode, lm.vocabulary.control
    end = min(lm.vocabulary.end_ids)
    written = {"main": encode(main[0])}
    for number, (piece, child) in enumerate(zip(main[1:], children, strict=True), start=1):
        written["main"] += [control["fork"], *encode(piece)]
        written[f"main.{number}"] = encode(child)
    return lambda thread, index: [*written[thread], end][index]


def test_a_wrapped_model_writes_apar_and_gives_its_pages_back() -> None:
    lm = tiny_lm("apar")
    script = forced(lm, ["1. Eat:", "\n2. Sleep:", "\nGood."], " at noon, slowly", " at night")
    stream = lm.stream("Tips?", SamplingParams(max_tokens=200), script=script)
    seen = list(stream)
    answer = stream.completion
    assert answer.text == "1. Eat: at noon, slowly\n2. Sleep: at night\nGood."
    assert answer.annotated == (
        "1. Eat:<fork/><child> at noon, slowly</child>\n"
        "2. Sleep:<fork/><child> at night</child>\nGood."
    )
    assert document(seen) == answer.text
    assert answer.method == "apar"
    assert not answer.issues
    assert [t.id for t in answer.threads] == ["main", "main.1", "main.2"]
    assert [t.injected_tokens for t in answer.threads] == [0, 1, 1]
    assert answer.usage.control_tokens == 2
    assert answer.usage.sequential_steps == answer.trace.critical_path_steps
    assert answer.usage.sequential_steps < answer.usage.completion_tokens
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


def test_a_saved_apar_model_loads_with_its_dialect(tmp_path: Any) -> None:
    lm = tiny_lm("apar")
    folder = lm.save(tmp_path / "model")
    loaded = LM.load(folder, dtype="float32", pool_slots=1024)
    assert loaded.card == lm.card
    assert loaded.card.dialect == "apar"
    params = SamplingParams(max_tokens=60, temperature=2.0)
    control = set(loaded.vocabulary.control.values())
    plain = loaded.generate("hello", params, method="sequential")[0]
    assert not {t for s in plain.trace.response for t in s.tokens} & control
    assert loaded.generate("hello", params)[0].method == "apar"
