"""Requests of dialect `planned`: spans, plans, budgets, isolation, endings, events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import run_all, scheduler_for
from plans import (
    CONTROL,
    END,
    NUM_SLOTS,
    TOLERANCE,
    VOCABULARY,
    FixedEngine,
    Snapshots,
    codes,
    conventions,
    counted,
    knobs,
    plan_ids,
    planned,
    random_plan,
    seeds,
    span_steps,
    variants,
    worst_gap,
)
from stubs import StubEngine

from stretto.dialects.planned import PLANNED_FORMS, PlanCaps, PlannedSettings
from stretto.dialects.planned_masks import PlannedMasks
from stretto.dialects.planned_text import parse_ids, parse_text
from stretto.dialects.tags import PromiseReader
from stretto.engines.hf import HFEngine
from stretto.errors import InvalidInput, UnknownName
from stretto.params import SamplingParams
from stretto.runtime import events
from stretto.runtime.denoiser import num_written, scheduled_passes
from stretto.runtime.request import Request
from stretto.runtime.views import Run
from stretto.trace import Trace

# -- what may stand in a span --------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=seeds, variant=variants)
def test_spans_hold_text_and_fillers_alone(seed: int, variant: str) -> None:
    request = planned(random_plan(seed), seed, variant=variant, temperature=5.0)
    counted(request)
    forbidden = (set(CONTROL.values()) - {CONTROL["pad"]}) | VOCABULARY.spare_ids | {END}
    for s in request.recorder.freeze().segments:
        if s.kind == "block":
            assert not forbidden & set(s.tokens[1:-1])
            assert list(s.markup[1:-1]) == [t == CONTROL["pad"] for t in s.tokens[1:-1]]
    assert not any(form in request.text for form in PLANNED_FORMS.values())


def test_a_script_cannot_put_a_mask_into_a_span() -> None:
    ids = plan_ids([[4]])
    request = planned([[4]], script=lambda t, i: ids[i] if t == "main" else CONTROL["mask"])
    counted(request)
    assert CONTROL["mask"] not in [t for s in request.recorder.segments for t in s.tokens]


@settings(max_examples=25, deadline=None)
@given(seed=seeds, variant=variants, convention=conventions)
def test_the_written_form_is_the_trace(seed: int, variant: str, convention: str) -> None:
    request = planned(random_plan(seed), seed, variant=variant, temperature=1.0)
    counted(request)
    trace = request.recorder.freeze()
    ids = [t for s in trace.response for t in s.tokens]
    setting = PlannedSettings(variant, convention, unit=1)
    prompt = [t for s in trace.prompt for t in s.tokens]
    parsed = parse_ids(prompt, ids, VOCABULARY, setting)
    assert shape_of(parsed.trace) == shape_of(trace)
    assert not parsed.issues
    assert parsed.text == request.text
    text, issues = request.session.annotated(request.recorder)
    assert not issues
    assert parse_text(text, VOCABULARY, setting).text == request.text


def shape_of(trace: Trace) -> list[object]:
    return [(s.thread, s.kind, s.role, s.sees, s.tokens, s.positions) for s in trace.segments]


def test_stop_ids_are_never_written_in_a_span() -> None:
    """They end what is written in order; a span ends where it is full."""

    def tokens(**options: Any) -> tuple[int, ...]:
        request = planned([[9, 9], [9]], 5, temperature=1.0, **options)
        counted(request)
        assert request.finish_reason == "stop"
        segments = request.recorder.freeze().segments
        return tuple(t for s in segments if s.kind == "block" for t in s.tokens[1:-1])

    drawn = tokens()
    banned = frozenset(drawn) - set(plan_ids([[9, 9], [9]], 5))
    assert len(banned) > 5
    other = tokens(stop_ids=banned)
    assert len(other) == len(drawn) == 27
    assert not set(other) & banned


@pytest.mark.parametrize("variant", ["sparse", "dense"])
@pytest.mark.parametrize("forced", ["main.1", "main.2"])
def test_the_penalty_is_about_what_a_span_sees(variant: str, forced: str) -> None:
    """In dense also what siblings have written in earlier passes; not in this one, whichever of
    them comes first."""
    first, second, third = 20, 21, 22
    ids = plan_ids([[2, 2]])

    def script(thread: str, index: int) -> int | None:
        return ids[index] if thread == "main" else second if thread == forced else None

    request = planned([[2, 2]], variant=variant, repetition_penalty=10.0, script=script)
    engine = FixedEngine(0)
    engine.table = torch.zeros_like(engine.table)
    engine.table[:, [first, second, third]] = torch.tensor([5.0, 4.0, 3.0])
    run_all(scheduler_for(engine, engine.num_slots), [request])
    spans = {s.thread: s.tokens[1:3] for s in request.recorder.freeze().segments}
    (other,) = {"main.1", "main.2"} - {forced}
    assert spans[forced] == (second, second)
    assert spans[other] == (first, third if variant == "dense" else second)


# -- the plan ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=seeds, max_tokens=st.sampled_from([20, 60, 2000]))
def test_any_model_writes_well_formed_plans(seed: int, max_tokens: int) -> None:
    """Nothing forced: the automaton alone. Only a budget leaves a promise unfinished."""
    caps = PlanCaps(max_promises=5, max_rounds=3, max_span_tokens=9)
    request = planned(
        [], seed, caps=caps, script=lambda thread, index: None, temperature=1.0,
        max_tokens=max_tokens,
    )  # fmt: skip
    counted(request)
    trace = request.recorder.freeze()
    plan = [t for s in trace.response if s.role == "plan" for t in s.tokens]
    num_promises, found = plan.count(CONTROL["promise"]), codes(request)
    assert plan.count(CONTROL["promise_end"]) == num_promises - found.count("unfinished-promise")
    assert num_promises <= 5
    assert plan.count(CONTROL["sync"]) <= 3
    assert not set(plan) & {CONTROL[name] for name in ("async", "async_end", "pad", "mask")}
    is_cut = request.num_drawn >= max_tokens or any("-" in code for code in found)
    assert is_cut or request.finish_reason == "stop"
    allowed = {"too-many-promises", "too-many-rounds", "promise-without-async"}
    if request.num_drawn == max_tokens:
        allowed |= {"unfinished-promise", "text-outside-span"}
    assert set(found) <= allowed
    assert request.num_drawn <= max_tokens


def test_a_runaway_plan_is_cut_and_reported() -> None:
    many = planned([[2] * 20], caps=PlanCaps(max_promises=3))
    counted(many)
    assert many.finish_reason == "length"
    assert len(span_steps(many)) == 3
    assert codes(many) == ["too-many-promises"]
    text, at = issue_of(many)  # where the promise would stand that is one too many
    assert text[:at].endswith("/>")
    assert text[at:].startswith("<async>")
    rounds = planned([[2]] * 5, caps=PlanCaps(max_rounds=2))
    counted(rounds)
    assert rounds.finish_reason == "length"
    assert len(span_steps(rounds)) == 2
    assert codes(rounds) == ["too-many-rounds"]
    text, at = issue_of(rounds)
    assert text[at:] == "<sync/>"
    at_once = planned([[2]], caps=PlanCaps(max_promises=0))
    counted(at_once)
    assert (issue_of(at_once), codes(at_once)) == (("", 0), ["too-many-promises"])
    exact = planned([[2], [2]], caps=PlanCaps(max_promises=2, max_rounds=2))
    counted(exact)
    assert exact.finish_reason == "stop"
    assert codes(exact) == []


def issue_of(request: Request) -> tuple[str, int]:
    """The annotated text, and where its only issue is."""
    text, (issue,) = request.session.annotated(request.recorder)
    return text, issue.at


def test_lengths_are_scaled_and_capped() -> None:
    for caps, expected in (
        (PlanCaps(scale=1.5), [6, 15]),
        (PlanCaps(scale=0.1), [1, 1]),
        (PlanCaps(max_span_tokens=5), [4, 5]),
    ):
        request = planned([[4, 10]], caps=caps)
        counted(request)
        assert [len(steps) for steps in span_steps(request).values()] == expected


def test_an_end_first_and_an_empty_plan_after_a_sync() -> None:
    """The automaton has no such plans; who forces them gets an answer that ends."""
    first = planned([], script=lambda thread, index: END)
    counted(first)
    assert (first.finish_reason, first.text, codes(first)) == ("stop", "", [])
    after = forced([*plan_ids([[3]])[:-1], CONTROL["sync"], END])
    assert (after.finish_reason, codes(after)) == ("stop", [])
    assert lengths_of(after) == [3]
    twice = forced([CONTROL["sync"], CONTROL["sync"], *plan_ids([[2]])])
    assert (twice.finish_reason, lengths_of(twice)) == ("stop", [2])


def forced(ids: list[int], **options: Any) -> Request:
    """A request whose main thread draws these, legal or not."""
    request = planned([], script=lambda thread, i: ids[i] if thread == "main" else None, **options)
    counted(request)
    return request


def lengths_of(request: Request) -> list[int]:
    return [len(s.tokens) - 2 for s in request.recorder.segments if s.kind == "block"]


@pytest.mark.parametrize(
    ("topic", "number", "length", "issues"),
    [
        ([1, 5], [2, 0], 20, []),  # "15", then 20
        ([30, 9, 9, 30, 2], [7], 7, []),
        ([9, 9, 9], [1, 0, 0], 100, []),
        ([], [0], 50, ["bad-tokens"]),
        ([], [0, 0], 50, ["bad-tokens"]),
        ([4], [], 50, ["bad-tokens"]),
        ([4], [9, 9, 9, 9], 50, ["bad-tokens"]),
    ],
)
def test_the_number_alone_says_how_long_a_span_is(
    topic: list[int], number: list[int], length: int, issues: list[str]
) -> None:
    """Digits in topics do not, whatever stands there; a bad number counts as 50."""
    names = [CONTROL[name] for name in ("promise", "tokens", "promise_end")]
    ids = [names[0], *topic, names[1], *number, names[2]]
    request = forced([*ids, CONTROL["sync"], *ids, END])
    assert lengths_of(request) == [length, length]
    assert codes(request) == issues * 2
    assert request.finish_reason == "stop"


def test_a_promise_that_is_none_is_text_and_gets_no_span() -> None:
    """Without a number the next promise is read afresh; text in a plan is named."""
    names = [CONTROL[name] for name in ("promise", "tokens", "promise_end")]
    ids = [names[0], 30, names[1], 3, CONTROL["promise"], 31, names[1], 4, names[2], END]
    request = forced(ids)
    assert lengths_of(request) == [4]
    assert "unfinished-promise" in codes(request)
    assert "text-outside-span" in codes(request)


@given(unit=st.sampled_from([1, 7, 10, 50]), digits=st.lists(st.integers(0, 9), max_size=5))
def test_only_numbers_from_one_to_the_largest_can_be_drawn(unit: int, digits: list[int]) -> None:
    """Each digit, and the end, is legal where the number is or may still become one."""
    masks, reader = PlannedMasks(VOCABULARY, unit), PromiseReader(VOCABULARY)
    largest = -(-2048 // unit)
    for token in (CONTROL["promise"], 1, 5, CONTROL["tokens"]):
        reader.read(token)
    value = 0
    for digit in digits:
        mask = masks.in_promise(reader).mask
        assert mask[CONTROL["promise_end"]] == (value > 0)
        legal = [d for d in range(10) if mask[d]]
        assert legal == [d for d in range(10) if 1 <= 10 * value + d <= largest]
        if digit not in legal:
            return
        reader.read(digit)
        value = 10 * value + digit


# -- budget --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["end", "sync"])
@pytest.mark.parametrize(
    ("extra", "spans"), [(0, 0), (3, 0), (4, 1), (8, 1), (9, 2), (11, 2), (12, 3), (13, 3)]
)
def test_spans_are_paid_for_in_promise_order(extra: int, spans: int, ending: str) -> None:
    """Lengths 4, 5, 3: the first that does not fit and all after it are not created, and the
    others are still written whole."""
    plan = [[4, 5, 3]] if ending == "end" else [[4, 5, 3], [1]]
    cost = len(plan_ids([[4, 5, 3]])) - (ending == "end")  # its sync stands where the end does
    request = planned(plan, max_tokens=cost + extra)
    counted(request)
    assert [len(steps) for steps in span_steps(request).values()] == [4, 5, 3][:spans]
    is_whole = spans == 3 and ending == "end"
    assert request.finish_reason == ("stop" if is_whole else "length")
    assert codes(request).count("promise-without-async") == 3 - spans
    is_next = spans == 3 and ending == "sync" and extra == 13  # a token of the next plan
    assert request.num_drawn == cost + sum([4, 5, 3][:spans]) + is_next


def test_a_sync_that_is_the_last_token_ends_with_length() -> None:
    plan = [[4], [3]]
    cost = len(plan_ids([[4]])) + 4  # its sync stands where the end does
    request = planned(plan, max_tokens=cost)
    counted(request)
    assert request.finish_reason == "length"
    assert len(span_steps(request)) == 1
    assert codes(request) == []


@pytest.mark.parametrize("room", range(12))
def test_positions_bound_spans_too(room: int) -> None:
    plan = [[4], [3]]
    start = planned(plan).num_prompt_tokens + len(plan_ids([[4]])) - 1
    request = planned(plan, max_positions=start + room)
    run_all(scheduler_for(StubEngine(96, max_positions=start + room), 1024), [request])
    assert len(span_steps(request)) == (room >= 6)
    positions = [p for s in request.recorder.freeze().segments for p in s.positions]
    assert positions == sorted(set(positions))
    assert max(positions) < start + room or not room


# -- isolation -----------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(seed=seeds, variant=variants, page_size=st.sampled_from([1, 4]))
def test_a_request_answers_as_it_does_alone(seed: int, variant: str, page_size: int) -> None:
    """Eight together, plan rows and span rows in one batch, whatever their knobs and seeds: in a
    roomy pool, in the passes of the slowest, and in one in which they are preempted."""

    def requests() -> list[Request]:
        return [
            planned(random_plan(seed + k), seed + k, variant=variant, **knobs(seed + k))
            for k in range(8)
        ]

    alone = requests()
    most_passes = max(counted(request).num_passes for request in alone)
    num_pages = 1024 // page_size
    for _ in range(2):
        together = requests()
        engine = StubEngine(96)
        scheduler = scheduler_for(engine, num_pages, page_size)
        run_all(scheduler, together)
        assert engine.num_passes == most_passes or scheduler.num_preemptions
        num_pages = 4 + max(request.memory.peak_pages for request in together)
        for request, its in zip(together, alone, strict=True):
            assert (request.text, request.finish_reason) == (its.text, "stop")
            assert request.recorder.freeze() == its.recorder.freeze()
    assert scheduler.num_preemptions


@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_a_span_that_outgrows_the_pool_alone_ends_with_length(variant: str) -> None:
    request = planned([[4], [90]], variant=variant)
    scheduler = scheduler_for(StubEngine(96), 64)
    run_all(scheduler, [request])
    assert request.finish_reason == "length"
    assert "[MASK]" not in request.text


def test_plan_rows_and_span_rows_share_a_pass() -> None:
    engine = Snapshots(StubEngine(96))
    one, two = planned([[12]]), planned([[2], [2], [2]], seed=1)
    engine.request = one
    run_all(scheduler_for(engine, 1024), [one, two])
    kinds = [{(id(r.view.memory), r.segment.kind) for r in runs} for *_, runs, _ in engine.passes]
    assert any(
        {(id(a.memory), "causal"), (id(b.memory), "block")} <= pair
        for pair in kinds
        for a, b in ((one, two), (two, one))
    )


class Restoring(Snapshots):
    """Sees that what is copied back is what was copied out; `num_in_span` counts how often that was
    of `request` with a span under way."""

    num_in_span = 0

    def copy_in(self, slots: list[int], kept: Any) -> None:
        self.engine.copy_in(slots, kept)
        mine, its = (leaves(state) for state in (self.engine.copy_out(slots), kept))
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
        assert self.request is not None
        threads = self.request.recorder.threads.values()
        self.num_in_span += any(t.is_open and t.own.kind == "block" for t in threads)


def leaves(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [leaf for part in state for leaf in leaves(part)]


@pytest.mark.parametrize("convention", ["shifted", "aligned"])
@pytest.mark.parametrize("variant", ["sparse", "dense"])
@pytest.mark.parametrize("seed", [0, 1])
def test_preempted_in_mid_span_it_comes_back_bit_for_bit(
    variant: str, seed: int, convention: str
) -> None:
    """Among others on a real model: the youngest, which is preempted, is still one masked pass."""
    model = tiny_model("llama")
    requests = [
        planned([[5, 5, 5], [3, 3]], seed + k, variant=variant, convention=convention)
        for k in range(3)
    ]
    engine = Restoring(HFEngine(model, NUM_SLOTS))
    engine.request = requests[-1]
    scheduler = scheduler_for(engine, 90)
    run_all(scheduler, requests)
    assert scheduler.num_preemptions
    assert engine.num_in_span
    assert all(request.finish_reason == "stop" for request in requests)
    assert worst_gap(model, engine) < TOLERANCE


@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_siblings_are_blind_to_one_another_unless_dense(variant: str) -> None:
    """A token forced into one span changes the other's logits in dense alone."""
    rows = []
    ids = plan_ids([[3, 5]])
    for other in (20, 21):
        of_main = {"main": ids, "main.1": [other] * 3, "main.2": [30] * 5}

        def script(thread: str, index: int, of: dict[str, list[int]] = of_main) -> int:
            return of[thread][index]

        engine = Snapshots(StubEngine(96))
        request = engine.request = planned([[3, 5]], variant=variant, script=script)
        run_all(scheduler_for(engine, 1024), [request])
        rows.append([
            logits[-len(run.kept) :]
            for *_, runs, logits in engine.passes
            for run in runs[-1:]
            if run.view.thread.name == "main.2" and run.kept
        ])  # fmt: skip
    same = [torch.equal(a, b) for a, b in zip(*rows, strict=True)]
    assert same[0]
    assert all(same) == (variant == "sparse")


@pytest.mark.parametrize("variant", ["sparse", "dense"])
@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_a_request_that_is_broken_off_gives_everything_back(variant: str, how: str) -> None:
    """After any number of passes: in a plan, a span, and where a sync waits for spans. What was
    written stays readable, and the other request is not touched."""
    alone = planned([[7]], seed=1)
    counted(alone)
    for steps in range(1, 27):
        engine = Breaking(StubEngine(96))
        scheduler = scheduler_for(engine, 256)
        request, other = planned([[4, 6], [3]], variant=variant), planned([[7]], seed=1)
        scheduler.submit(request)
        scheduler.submit(other)
        for _ in range(steps):
            scheduler.step()
        is_late = request.is_done
        if how == "cancel":
            scheduler.cancel(request)
        elif not is_late:
            engine.target = request
            scheduler.step()
            assert request.error == "broken"
        scheduler.check_integrity()
        assert request.finish_reason == ("stop" if is_late else ENDS[how])
        text, issues = request.session.annotated(request.recorder)
        assert "[MASK]" not in text + request.text
        named = {"unfinished-promise", "text-outside-span", "promise-without-async"}
        assert {issue.code for issue in issues} <= named
        while scheduler.step():
            scheduler.check_integrity()
        assert other.text == alone.text
        assert scheduler.pool.num_free_pages == 256
    assert is_late


ENDS = {"cancel": "cancelled", "fail": "error"}


class Breaking:
    """An engine that fails in every pass with a row of the request `target`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.target: Request | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def forward(self, runs: list[Run]) -> torch.Tensor:
        if self.target is not None and any(r.view.memory is self.target.memory for r in runs):
            raise RuntimeError("broken")
        return self.engine.forward(runs)


@pytest.mark.parametrize("plan", [[[6, 9]], [[6, 9], [3]]])
@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_a_stop_string_counts_once_its_span_is_done(plan: list[list[int]], variant: str) -> None:
    """Then it ends the request, though a sibling is under way and a sync waits for it."""
    ids = plan_ids(plan)
    stop = VOCABULARY.decode([23])

    def script(thread: str, index: int) -> int | None:
        return ids[index] if thread == "main" else 20 + index

    request = planned(plan, script=script, stop=(stop,), variant=variant)
    counted(request)
    assert request.finish_reason == "stop"
    assert request.text == VOCABULARY.decode([20, 21, 22])
    until = 6 if variant == "sparse" else 9  # a dense sibling goes on being a query
    drawn = len(plan_ids([[6, 9]])) - (len(plan) == 1)
    assert max(map(max, span_steps(request).values())) == drawn + until


# -- randomness and events -----------------------------------------------------------------------


def test_draws_go_by_seed_and_sample() -> None:
    """The prompt and the plan are the same; `planned` takes both from its own seed."""

    def text(**options: Any) -> str:
        request = planned([[9, 9]], 3, temperature=1.0, **options)
        counted(request)
        return request.text

    assert text() == text()
    assert len({text(), text(sampling_seed=4), text(sample=1)}) == 3


def test_events_tell_of_every_pass() -> None:
    request = planned([[5, 2], [3]], steps_ratio=0.5)
    counted(request)
    log = request.log.events
    for name, length in (("main.1", 5), ("main.2", 2), ("main.3", 3)):
        passes = [e for e in log if isinstance(e, events.Denoised) and e.thread == name]
        assert [e.pass_number for e in passes] == list(range(scheduled_passes(length, 0.5) + 1))
        assert [e.num_left for e in passes] == [
            length - num_written(length, len(passes) - 1, i) for i in range(len(passes))
        ]
        at = {i: token for e in passes for i, token in zip(e.indices, e.tokens, strict=True)}
        tokens = [e for e in log if isinstance(e, events.Token) and e.thread == name]
        assert [e.token for e in tokens[1:-1]] == [at[i] for i in range(length)]
        assert all(e.logprob is not None and e.logprob <= 0 for e in tokens[1:-1])
        kinds = [e.type for e in log if getattr(e, "thread", None) == name]
        assert kinds[0] == "thread_start"
        assert kinds[-1] == "thread_end"
    assert events.to_json(passes[0])["type"] == "denoise"


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"steps_ratio": 0}, InvalidInput, "steps_ratio must be above 0"),
        ({"steps_ratio": 1.5}, InvalidInput, "at most 1"),
        ({"threshold": -0.1}, InvalidInput, "threshold must be at least 0"),
        ({"threshold": float("nan")}, InvalidInput, "finite"),
        ({"threshold": 0.5, "steps_ratio": 0.5}, InvalidInput, "two schedules"),
        ({"order": "entropi"}, UnknownName, "did you mean 'entropy'"),
        ({"length_scale": 0}, InvalidInput, "length_scale must be above 0"),
        ({"max_rounds": 0}, InvalidInput, "max_rounds must be at least 1"),
        ({"early_finish": 1}, InvalidInput, "early_finish"),
    ],
)
def test_bad_knobs_are_refused(
    values: dict[str, Any], error: type[InvalidInput], message: str
) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**values)
