"""Denoising in the runtime: state by state one masked pass, what is fed, and schedules."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import run_all, scheduler_for
from plans import (
    CONTROL,
    MASKS,
    NUM_SLOTS,
    TOLERANCE,
    VOCABULARY,
    BlockSession,
    FixedEngine,
    Snapshots,
    conventions,
    counted,
    knobs,
    plan_ids,
    planned,
    random_plan,
    seeds,
    span_steps,
    tokens_of,
    variants,
    worst_gap,
)

from stretto.engines.flex import FlexEngine
from stretto.engines.fused import FusedEngine
from stretto.engines.hf import HFEngine
from stretto.engines.packed import PackedEngine
from stretto.masks import dense_mask, flat_positions, flat_tokens
from stretto.params import ORDERS
from stretto.recorder import Recorder
from stretto.runtime import events
from stretto.runtime.denoiser import (
    Distributions,
    best,
    num_written,
    scheduled_passes,
)
from stretto.runtime.request import Request


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
@settings(max_examples=20, deadline=None)
@given(seed=seeds, variant=variants, convention=conventions, page_size=st.sampled_from([1, 4]))
def test_every_state_is_one_masked_pass(
    kind: str, seed: int, variant: str, convention: str, page_size: int
) -> None:
    model = tiny_model(kind)
    engine = Snapshots(HFEngine(model, NUM_SLOTS))
    request = planned(
        random_plan(seed), seed, variant=variant, convention=convention, **knobs(seed)
    )
    engine.request = request
    run_all(scheduler_for(engine, NUM_SLOTS // page_size, page_size), [request])
    assert request.finish_reason == "stop"
    assert worst_gap(model, engine) < TOLERANCE
    assert any(len(logits) for *_, logits in engine.passes)  # something was held to the other


@pytest.mark.parametrize("kind", [FusedEngine, PackedEngine])
@settings(max_examples=10, deadline=None)
@given(seed=seeds, variant=variants, convention=conventions)
def test_engines_that_pack_weights_know_blocks(
    kind: type[FusedEngine] | type[PackedEngine], seed: int, variant: str, convention: str
) -> None:
    model = tiny_model("llama", head_dim=16)
    engine = Snapshots(kind(copy.deepcopy(model), NUM_SLOTS))
    request = planned(
        random_plan(seed), seed, variant=variant, convention=convention, **knobs(seed)
    )
    engine.request = request
    run_all(scheduler_for(engine, NUM_SLOTS), [request])
    assert worst_gap(model, engine) < TOLERANCE


@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_engine_flex_knows_blocks(variant: str) -> None:
    model = tiny_model("llama")
    engine = Snapshots(FlexEngine(model, NUM_SLOTS, 4, block_size=4))
    request = planned([[5, 3], [6]], variant=variant)
    engine.request = request
    run_all(scheduler_for(engine, NUM_SLOTS // 4, 4), [request])
    assert worst_gap(model, engine) < TOLERANCE


def test_a_missed_commit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the last masked pass are not those of what was written."""
    model = tiny_model("llama")
    settled = Recorder.join

    def join(self: Recorder, parent: Any, effect: Any) -> None:
        for name in effect.children:
            self._settle(self.threads[name])
        settled(self, parent, effect)

    monkeypatch.setattr(Recorder, "join", join)
    engine = Snapshots(HFEngine(model, NUM_SLOTS))
    engine.request = request = planned([[4, 2], [3]])
    run_all(scheduler_for(engine, NUM_SLOTS), [request])
    assert worst_gap(model, engine) > 10 * TOLERANCE


@settings(max_examples=15, deadline=None)
@given(seed=seeds, variant=variants, max_rows=st.sampled_from([1, 3, 7, 512]))
def test_rows_may_come_in_several_passes(seed: int, variant: str, max_rows: int) -> None:
    model = tiny_model("llama")
    requests = [planned(random_plan(seed), seed, variant=variant) for _ in range(2)]
    engine = Snapshots(HFEngine(model, NUM_SLOTS))
    engine.request = requests[0]
    run_all(scheduler_for(engine, NUM_SLOTS, max_rows=max_rows), requests[:1])
    for *_, runs, _ in engine.passes:
        assert sum(len(run.tokens) for run in runs) <= max(max_rows, 3 * 9)
    run_all(scheduler_for(HFEngine(model, NUM_SLOTS), NUM_SLOTS), requests[1:])
    assert requests[0].text == requests[1].text


@pytest.mark.parametrize("variant", ["sparse", "dense"])
@settings(max_examples=6, deadline=None)
@given(seed=seeds, convention=conventions)
def test_committed_keys_and_values_are_those_of_the_clean_tokens(
    variant: str, seed: int, convention: str
) -> None:
    """Wherever no block is under way, after each round, every slot holds what one fresh pass over
    the trace computes: also of the token written last, of spans done at different steps."""
    model = tiny_model("llama")
    engine = HFEngine(model, NUM_SLOTS)
    scheduler = scheduler_for(engine, NUM_SLOTS)
    plan = [[2, 6], [3], *random_plan(seed), [1]]
    request = planned(plan, seed, variant=variant, convention=convention, **knobs(seed))
    scheduler.submit(request)
    rounds = set()
    while scheduler.step():
        if not request.is_done and not has_stale_blocks(request.recorder):
            order = list(request.recorder.document_order())
            rounds.add(sum(s.kind == "block" for s in order))
            lists = [request.memory.slots.get(s.handle) for s in order]
            slots = [slot for own in lists if own is not None for slot in own.slots]
            gap = gap_to_a_fresh_pass(model, request.recorder, engine.copy_out(slots)[0])
            assert gap < TOLERANCE
    assert len(rounds) == len(plan)
    assert request.finish_reason == "stop"


def has_stale_blocks(recorder: Recorder) -> bool:
    threads = recorder.threads.values()
    return any(t.is_stale or (t.own.kind == "block" and t.unfed) for t in threads)


def gap_to_a_fresh_pass(model: Any, recorder: Recorder, kept: list[Any]) -> float:
    """Largest difference between keys and values by layer, of the first tokens of the trace, and
    those of one masked pass."""
    trace, n = recorder.freeze(), kept[0][0].shape[-2]
    with torch.inference_mode():
        cache = model(
            input_ids=flat_tokens(trace)[None, :n],
            position_ids=flat_positions(trace)[None, :n],
            attention_mask=dense_mask(trace)[None, None, :n, :n],
            use_cache=True,
        ).past_key_values
    return max(
        float((mine - its).abs().max())
        for own, layer in zip(kept, cache.layers, strict=True)
        for mine, its in zip(own, (layer.keys, layer.values), strict=True)
    )


@pytest.mark.parametrize("page_size", [1, 4])
@settings(max_examples=25, deadline=None)
@given(seed=seeds, convention=conventions)
def test_blocks_in_random_orchestras_are_one_masked_pass(
    page_size: int, seed: int, convention: str
) -> None:
    """Of any thread, among forks, joins, cuts and evictions, joined or never joined."""
    model = tiny_model("llama")
    engine = Snapshots(HFEngine(model, NUM_SLOTS))
    request = BlockSession(seed, is_shifted=convention == "shifted").request()
    engine.request = request
    run_all(scheduler_for(engine, NUM_SLOTS // page_size, page_size), [request])
    assert worst_gap(model, engine) < TOLERANCE


# -- what is fed ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=seeds, variant=variants, ratio=st.sampled_from([1.0, 0.5, 0.1, 0.34]))
def test_passes_are_plan_tokens_and_steps(seed: int, variant: str, ratio: float) -> None:
    plan = random_plan(seed)
    request = planned(plan, seed, variant=variant, steps_ratio=ratio)
    engine = counted(request)
    steps = sum(max(scheduled_passes(length, ratio) for length in lengths) for lengths in plan)
    assert engine.num_passes == len(plan_ids(plan, seed)) + steps
    trace = request.recorder.freeze()
    measured = max(s for segment in trace.response for s in segment.steps if s is not None)
    assert measured == trace.critical_path_steps == len(plan_ids(plan, seed)) - 1 + steps


@settings(max_examples=30, deadline=None)
@given(seed=seeds, convention=conventions)
def test_the_head_computes_masked_rows_alone(seed: int, convention: str) -> None:
    """And spans that are done are no queries any more in sparse; until all are done in dense."""
    plan = random_plan(seed)
    masked = sum(n for lengths in plan for size in lengths for n in range(1, size + 1))
    sparse = counted(planned(plan, seed, convention=convention))
    assert sparse.num_logit_rows == len(plan_ids(plan, seed)) + masked
    full = counted(planned(plan, seed, convention=convention, variant="dense"))
    assert full.num_logit_rows == sparse.num_logit_rows
    rows = sum((size + 2) * size for lengths in plan for size in lengths)
    commits = sum(size + 2 for lengths in plan[:-1] for size in lengths)
    prompt = planned(plan, seed).num_prompt_tokens
    assert sparse.num_rows == prompt + len(plan_ids(plan, seed)) - 1 + rows + commits
    longer = sum((size + 2) * max(lengths) for lengths in plan for size in lengths)
    assert full.num_rows == sparse.num_rows - rows + longer


def test_nothing_is_committed_before_an_end() -> None:
    engine = counted(planned([[4]]))
    assert engine.num_passes == len(plan_ids([[4]])) + 4


# -- several requests ----------------------------------------------------------------------------


GAP = 1e-3
"""Two logits, or scores, that are closer may change places with what else is in a batch."""


def test_eight_requests_answer_as_each_does_alone() -> None:
    """On a model in float32, in fewer passes than two of them. Where an answer differs, the first
    pass that does had a choice between two that are closer than `GAP`."""
    model, num_slots = tiny_model("llama"), 4 * NUM_SLOTS

    def requests() -> list[Request]:
        return [
            planned(
                random_plan(11 + k), 11 + k, variant=("sparse", "dense")[k % 2],
                convention=("shifted", "aligned")[k // 4], steps_ratio=(1.0, 0.5, 0.3)[k % 3],
            )
            for k in range(8)
        ]  # fmt: skip

    def run(some: list[Request]) -> Snapshots:
        engine = Snapshots(HFEngine(model, num_slots))
        engine.request = some[0]
        run_all(scheduler_for(engine, num_slots), some)
        return engine

    alone, together = requests(), requests()
    engines = [run([request]) for request in alone]
    num_passes = [len(engine.passes) for engine in engines]
    assert len(run(together).passes) == max(num_passes) < sum(num_passes) / 2
    num_same = 0
    for its, mine, engine in zip(alone, together, engines, strict=True):
        differing = [a for a, b in zip(writings(its), writings(mine), strict=False) if a != b]
        if differing:
            assert narrowest_choice(engine, differing[0]) < GAP
        else:
            assert mine.recorder.freeze() == its.recorder.freeze()
            assert mine.text == its.text
            num_same += 1
    assert num_same >= 6


def writings(request: Request) -> list[events.Denoised]:
    """What each pass has written in each block, in order."""
    return [e for e in request.log.events if isinstance(e, events.Denoised) and e.pass_number]


def narrowest_choice(engine: Snapshots, writing: events.Denoised) -> float:
    """How close it was what a pass wrote, lowest entropy first: between the last place that was
    written and the first that was not, and between the two likeliest tokens of a place."""
    (logits,) = [
        logits[start : start + run.num_logits]
        for trace, ids, runs, logits in engine.passes
        for run, start in zip(runs, starts_of(runs), strict=True)
        if run.num_logits and run.segment.handle == writing.segment
        if len(run.kept) == writing.num_left + len(writing.indices)
    ]
    rows = logits.masked_fill(~torch.from_numpy(MASKS.span.mask), -torch.inf)
    entropies = torch.special.entr(torch.softmax(rows, -1)).sum(-1).sort().values
    count = len(writing.indices)
    two = rows.topk(2).values
    gaps = [*(two[:, 0] - two[:, 1]), *(entropies[count:][:1] - entropies[count - 1 : count])]
    return min(float(gap) for gap in gaps)


def starts_of(runs: list[Any]) -> list[int]:
    """Where the logits of each run begin among those of a pass."""
    return [0, *itertools.accumulate(run.num_logits for run in runs)][: len(runs)]


def test_a_narrow_choice_is_known_as_one() -> None:
    """Between two tokens of a place that are 0.25 apart; between places that are alike."""
    for length, narrow in ((1, 0.25), (3, 0.0)):
        request, engine = planned([[length]]), FixedEngine(0)
        engine.table = torch.zeros_like(engine.table)
        engine.table[:, 20], engine.table[:, 21] = 5.0, 4.75
        seen = Snapshots(engine)
        seen.request = request
        run_all(scheduler_for(seen, engine.num_slots), [request])
        assert narrowest_choice(seen, writings(request)[0]) == narrow


# -- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_a_ratio_of_one_writes_one_token_a_step(order: str, variant: str) -> None:
    request = planned([[5, 9, 1]], variant=variant, order=order)
    counted(request)
    for steps, length in zip(span_steps(request).values(), (5, 9, 1), strict=True):
        first = len(plan_ids([[5, 9, 1]]))
        assert sorted(steps) == list(range(first, first + length))


@given(length=st.integers(1, 300), ratio=st.sampled_from([0.001, 0.1, 0.3, 0.5, 2 / 3, 0.7, 1.0]))
def test_the_schedule_writes_all_tokens_evenly(length: int, ratio: float) -> None:
    passes = scheduled_passes(length, ratio)
    assert passes >= 1
    assert passes - 1 < ratio * length <= passes or passes == 1
    each = [
        num_written(length, passes, i + 1) - num_written(length, passes, i) for i in range(passes)
    ]
    assert sum(each) == length
    assert min(each) >= 1
    assert max(each) - min(each) <= 1


def test_a_ratio_is_what_is_written() -> None:
    assert scheduled_passes(30, 0.1) == 3  # 0.1 * 30 is more than 3 in binary
    assert scheduled_passes(10, 0.7) == 7


@settings(max_examples=15, deadline=None)
@given(seed=seeds, order=st.sampled_from(["entropy", "confidence", "margin", "random"]))
def test_thresholds(seed: int, order: str) -> None:
    """0 takes one step, what nothing reaches one step a token, and less never takes more: one step
    for all that is likely enough, and one for each token that is not."""

    def decoded(threshold: float) -> Request:
        request = planned([[9, 4]], threshold=threshold, order=order)
        engine = FixedEngine(seed)
        run_all(scheduler_for(engine, engine.num_slots), [request])
        return request

    slowest = decoded(1.5)
    likely = {
        name: [np.exp(e.logprob) for e in tokens_of(slowest, name)] for name in ("main.1", "main.2")
    }
    chosen = sorted(p * (1 - 1e-6) for ps in likely.values() for p in ps)
    lengths = []
    for threshold in [0.0, *chosen, 1.5]:
        steps = span_steps(decoded(threshold))
        expected = {
            name: sum(p < threshold for p in ps) + any(p >= threshold for p in ps)
            for name, ps in likely.items()
        }
        assert {name: len(set(own)) for name, own in steps.items()} == expected
        lengths.append(expected)
    assert (lengths[0], lengths[-1]) == ({"main.1": 1, "main.2": 1}, {"main.1": 9, "main.2": 4})
    for less, more in itertools.pairwise(lengths):
        assert all(less[name] <= more[name] for name in likely)


def test_a_threshold_writes_all_that_is_likely_enough() -> None:
    """By the probability of what was drawn, untempered; of what is not, the best alone."""
    request = planned([[20]], threshold=0.1, temperature=0.5)
    engine = FixedEngine(seed=5)
    run_all(scheduler_for(engine, engine.num_slots), [request])
    passes = [e for e in request.log.events if isinstance(e, events.Denoised)][1:]
    logprobs = {e.index: e.logprob for e in tokens_of(request, "main.1")}
    assert 1 < len(passes) < 20
    assert any(len(e.indices) > 1 for e in passes)
    for written in passes:
        likely = [np.exp(logprobs[1 + i]) >= 0.1 for i in written.indices]
        assert all(likely) or len(likely) == 1


@pytest.mark.parametrize("order", ["entropy", "confidence", "margin"])
def test_orders_write_the_best_first(order: str) -> None:
    """By the model's own distribution, whatever the temperature; ties from left to right."""
    request = planned([[9]], order=order, temperature=0.9, top_p=0.7)
    engine = FixedEngine(seed=1)
    run_all(scheduler_for(engine, engine.num_slots), [request])
    (span,) = [s for s in request.recorder.freeze().segments if s.kind == "block"]
    legal = torch.from_numpy(MASKS.span.mask)
    scores = []
    for index in range(1, 10):
        row = engine.table[span.positions[index] - 1].masked_fill(~legal, -torch.inf)
        p = torch.softmax(row, -1)
        two = p.topk(2).values
        scores.append({
            "entropy": -float(torch.special.entr(p).sum()),
            "confidence": float(p[span.tokens[index]]),
            "margin": float(two[0] - two[1]),
        }[order])  # fmt: skip
    by_step = sorted(range(9), key=lambda i: span.steps[i + 1] or 0)
    if order == "confidence":  # a value is drawn anew in each pass: those written first did best
        assert statistics.mean(scores[i] for i in by_step[:3]) > statistics.mean(scores)
    else:
        assert by_step == sorted(range(9), key=lambda i: -scores[i])


def test_by_confidence_the_likeliest_values_are_written_first() -> None:
    """At temperature 0 a value is the same in each pass, so that the order is that of its p."""
    request = planned([[9]], order="confidence", temperature=0.0)
    engine = FixedEngine(seed=1)
    run_all(scheduler_for(engine, engine.num_slots), [request])
    (span,) = [s for s in request.recorder.freeze().segments if s.kind == "block"]
    legal = torch.from_numpy(MASKS.span.mask)
    rows = [
        engine.table[span.positions[i] - 1].masked_fill(~legal, -torch.inf) for i in range(1, 10)
    ]
    scores = [float(torch.softmax(row, -1).max()) for row in rows]
    assert sorted(range(9), key=lambda i: span.steps[i + 1] or 0) == sorted(
        range(9), key=lambda i: -scores[i]
    )


def test_a_random_order_goes_by_the_seed() -> None:
    """And not by what the model says of a place; what is in a batch changes nothing, as of the
    other orders."""

    def order(seed: int, table: int) -> list[int]:
        request = planned([[9]], order="random", sampling_seed=seed)
        engine = FixedEngine(table)
        run_all(scheduler_for(engine, engine.num_slots), [request])
        steps = span_steps(request)["main.1"]
        return sorted(range(9), key=lambda i: steps[i])

    assert order(1, 0) == order(1, 5)
    assert len({tuple(order(seed, 0)) for seed in range(5)}) == 5


def test_the_best_are_those_of_highest_score() -> None:
    scores = np.array([0.1, 0.7, np.nan, 0.7, 0.2])
    assert best(scores, 1) == best(scores, 0) == [1]
    assert best(scores, 3) == [1, 3, 4]
    assert best(scores, 9) == [0, 1, 2, 3, 4]
    assert best(np.full(3, np.nan), 1) == [0]


def test_early_finish_closes_the_tail() -> None:
    pad, ids = CONTROL["pad"], plan_ids([[8]])
    written = {0: 40, 1: 41, 2: pad}

    def script(thread: str, index: int) -> int | None:
        return ids[index] if thread == "main" else written.get(index, 42)

    class LeftToRight(FixedEngine):
        def __init__(self) -> None:
            super().__init__(0)
            self.table = torch.zeros(512, 96)
            self.table[:, 40] = torch.linspace(20, 1, 512)

    for early, expected in ((True, 3), (False, 8)):
        request = planned([[8]], script=script, early_finish=early)
        engine = LeftToRight()
        run_all(scheduler_for(engine, engine.num_slots), [request])
        (span,) = [s for s in request.recorder.freeze().segments if s.kind == "block"]
        assert len([s for s in span.steps if s is not None]) == expected
        assert span.num_passes == expected
        assert span.tokens[1:4] == (40, 41, pad)
        assert (set(span.tokens[4:9]) == {pad}) == early
        assert request.text == VOCABULARY.decode([40, 41] + [42] * (0 if early else 5))
        assert request.num_drawn == len(ids) - 1 + 8


@pytest.mark.parametrize("order", ["entropy", "confidence", "margin", "random"])
@pytest.mark.parametrize("threshold", [None, 1.5])
def test_a_pass_measures_what_its_order_reads(
    order: str, threshold: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a large vocabulary each figure of all masked rows is much work."""
    counts = {"entropies": 0, "margins": 0, "logprobs": 0}
    for name in counts:
        own = getattr(Distributions, name)

        def counting(
            self: Distributions, *args: Any, name: str = name, own: Callable[..., Any] = own
        ) -> Any:
            found = own(self, *args)
            counts[name] += len(found)
            return found

        monkeypatch.setattr(Distributions, name, counting)
    counted(planned([[5]], order=order, threshold=threshold))
    masked = 5 + 4 + 3 + 2 + 1
    draws_all = threshold is not None or order == "confidence"
    assert counts == {
        "entropies": masked if order == "entropy" else 0,
        "margins": masked if order == "margin" else 0,
        "logprobs": masked if draws_all else 5,
    }


def test_a_threshold_that_is_reached_measures_likelihoods_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Distributions, "entropies")
    counted(planned([[5]], threshold=0.0))
