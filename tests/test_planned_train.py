"""Training of dialect planned: what is computed of hidden tokens is what decoding computes."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from planned_kit import (
    PROMPT,
    example_of,
    hide,
    logits_of,
    maker_of,
    planned_lm,
    planned_rows,
    planned_text,
    prompt_ids,
    span,
    streams_of,
)
from tiny_lms import tiny_lm
from train_job import write_rows

from stretto import LM, SamplingParams
from stretto.errors import InvalidInput, UnknownName, Unsupported
from stretto.masks import dense_mask, flat_positions, flat_tokens
from stretto.methods import get_method
from stretto.methods.diffusion import Diffusion, Window
from stretto.models.tiny import make_tiny
from stretto.train import SftConfig, train_sft
from stretto.train.batches import Batch
from stretto.train.examples import IGNORE, Example
from stretto.train.lengths import relabel
from stretto.train.loop import Loop, LoopSettings
from stretto.train.noise import LEAST_LEVEL, Noise, draw_noise, generator_of, pruned
from stretto.train.packing import BatchSize, PackedSteps
from stretto.train.planned import LossWeights, Planned
from stretto.train.renewed import Renewed, Turns, lengthened
from stretto.train.schedule import Schedule
from stretto.train.unusable import SpanTooLong, WindowTooSmall

VARIANTS = ("sparse", "dense")
CONVENTIONS = ("shifted", "aligned")
TOLERANCE = 1e-4
TWO_ROUNDS = (
    f"{span('one', 'Paris is', 10)}{span('two', 'the capital', 20)}<sync/>{span('sum', 'more', 10)}"
)


def objective(lm: LM, examples: list[Example], **changes: Any) -> Planned:
    own = {"mask": lm.card.control["mask"], "shifted": lm.card.convention == "shifted"}
    return Planned(Renewed(examples), **{**own, **changes})


def some_noise(example: Example, seed: int) -> Noise:
    return draw_noise(example, generator_of(seed, 0))


# -- what is in an example -------------------------------------------------------------------------


def test_spans_are_filled_up_to_their_promise_and_main_predicts_its_own_tokens() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    control = lm.card.control
    blocks = [(example.segment == b).nonzero()[:, 0] for b in example.is_block.nonzero()[:, 0]]
    assert [len(rows) - 2 for rows in blocks] == [10, 20, 10]
    pads = [int((example.ids[rows] == control["pad"]).sum()) for rows in blocks]
    sizes = [len(lm.vocabulary.encode(t)) for t in ("Paris is", "the capital", "more")]
    assert pads == [10 - sizes[0], 20 - sizes[1], 10 - sizes[2]]
    assert int(example.written.sum()) == 40
    assert not example.written[[int(r[0]) for r in blocks] + [int(r[-1]) for r in blocks]].any()
    assert torch.equal(example.positions, torch.arange(len(example)))
    targets = example.targets[example.targets != IGNORE].tolist()
    plan = example.ids[~example.is_block[example.segment]].tolist()[len(prompt_ids(lm)) :]
    assert targets == [*plan, min(lm.vocabulary.end_ids)]
    assert example.num_illegal == 0


def test_the_last_token_of_a_plan_predicts_what_ends_the_round() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    last = (example.ids == lm.card.control["promise_end"]).nonzero()[:, 0].tolist()
    sync, end = lm.card.control["sync"], min(lm.vocabulary.end_ids)
    assert [int(example.targets[i]) for i in (last[1], last[2])] == [sync, end]
    place = int((example.ids == sync).nonzero()[0, 0])
    assert int(example.targets[place]) == lm.card.control["promise"]


def test_a_span_that_is_longer_than_promised_is_left_out() -> None:
    lm = planned_lm()
    text = span("one", "Paris is the capital", 10)
    with pytest.raises(SpanTooLong, match="longer than promised"):
        example_of(lm, text)
    assert int(example_of(lm, relabel(text, lm.vocabulary, 10)).written.sum()) > 10


# -- who sees what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_copies_see_what_their_spans_see_and_no_clean_span_of_their_round(
    variant: str, seed: int
) -> None:
    """By the rule of the two streams, entry by entry."""
    lm = planned_lm(variant)
    example = example_of(lm, planned_text(lm, seed))
    streams = streams_of(lm, example, hide(example, example.written))
    both, clean = streams.example, len(example.is_block)
    blocks = example.is_block.nonzero()[:, 0].tolist()
    origin = [*range(clean), *blocks]
    syncs = torch.cumsum((example.ids == lm.card.control["sync"]).int(), 0)
    rounds = [int(syncs[example.segment == s][0]) for s in range(clean)]
    mutual = [[rounds[a] == rounds[b] for b in blocks] for a in blocks]
    visible = Batch.of([both]).visible()
    plain = Batch.of([example]).visible()
    ends = both.segment[1:] != both.segment[:-1]  # a first and a last token stand for a segment
    chosen = [0, *ends.nonzero()[:, 0].tolist(), *(ends.nonzero()[:, 0] + 1).tolist()]
    for q, k in itertools.product(chosen, repeat=2):
        own, other = int(both.segment[q]), int(both.segment[k])
        if own < clean:
            expected = other < clean and bool(plain[q, k])
        elif other >= clean:
            together = variant == "dense" and mutual[own - clean][other - clean]
            expected = own == other or together
        else:
            a, b = origin[own], other
            is_rival = example.is_block[b] and rounds[a] == rounds[b]
            expected = bool(example.sees[a, b]) and not is_rival
        assert bool(visible[q, k]) == expected, (q, k)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_what_is_predicted_is_hidden_and_no_copy_of_it_is_in_view(
    variant: str, convention: str
) -> None:
    """The clean tokens of a round can be anything: its copies predict the same."""
    lm = planned_lm(variant, convention)
    example = example_of(lm, planned_text(lm, 5))
    streams = streams_of(lm, example, some_noise(example, 3))
    both, mask = streams.example, lm.card.control["mask"]
    rows = ((both.targets != IGNORE) & streams.is_copy).nonzero()[:, 0]
    places = rows + int(convention == "shifted")
    assert len(rows) > 10
    assert bool((both.ids[places] == mask).all())
    assert bool((both.segment[places] == both.segment[rows]).all())
    before = logits_of(lm.model, both)
    first_sync = int((example.ids == lm.card.control["sync"]).nonzero()[0, 0])
    early = example.written & (torch.arange(len(example)) < first_sync)
    changed = torch.cat([early, torch.zeros(len(both) - len(example), dtype=torch.bool)])
    after = logits_of(lm.model, replace(both, ids=torch.where(changed, 7, both.ids)))
    of_first = streams.is_copy & (both.positions < int(example.positions[first_sync]))
    assert torch.allclose(before[of_first], after[of_first], atol=1e-6)
    later = streams.is_copy & ~of_first
    assert float((before[later] - after[later]).abs().max()) > 1e-2
    assert float((before[first_sync] - after[first_sync]).abs().max()) > 1e-2


def test_siblings_are_seen_in_dense_alone() -> None:
    text = span("one", "Paris is", 10) + span("two", "the capital", 20)
    gaps = []
    for variant in VARIANTS:
        lm = planned_lm(variant)
        example = example_of(lm, text)
        both = streams_of(lm, example, hide(example, example.written)).example
        second = both.segment == int(both.segment.max())
        first = both.segment == int(both.segment.max()) - 1
        before = logits_of(lm.model, both)
        after = logits_of(lm.model, replace(both, ids=torch.where(first, 7, both.ids)))
        gaps.append(float((before[second] - after[second]).abs().max()))
    assert gaps[0] == 0.0
    assert gaps[1] > 1e-2


# -- noise -----------------------------------------------------------------------------------------


def test_tags_and_plans_are_never_hidden_and_fillers_are() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    ever = torch.zeros(len(example), dtype=torch.bool)
    for seed in range(60):
        ever |= some_noise(example, seed).hidden
    assert torch.equal(ever, example.written)
    assert bool((example.ids[ever] == lm.card.control["pad"]).any())
    with pytest.raises(ValueError, match="a block writes"):
        streams_of(lm, example, hide(example, torch.ones(len(example), dtype=torch.bool)))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_everything_counts_once_where_all_is_hidden_and_nothing_where_nothing_is(
    convention: str,
) -> None:
    lm = planned_lm(convention=convention)
    example = example_of(lm, TWO_ROUNDS)
    whole = streams_of(lm, example, hide(example, example.written, 1.0))
    found = whole.example.targets[whole.is_copy]
    assert found[found != IGNORE].tolist() == example.ids[example.written].tolist()
    assert whole.weights[whole.is_copy].sum() == example.written.sum()
    none = streams_of(lm, example, hide(example, torch.zeros_like(example.written), LEAST_LEVEL))
    assert not (none.example.targets[none.is_copy] != IGNORE).any()


def test_levels_are_of_a_span_or_in_dense_of_a_round() -> None:
    for variant, distinct in (("sparse", 3), ("dense", 2)):
        example = example_of(planned_lm(variant), TWO_ROUNDS)
        levels = some_noise(example, 1).levels[example.written]
        assert len(levels.unique()) == distinct
        assert bool(((levels > LEAST_LEVEL) & (levels <= 1)).all())


@torch.no_grad()
def test_the_expected_loss_is_that_of_all_masks() -> None:
    """E over t and masks of the weighted loss = the sum over all masks, each with its exact
    weight: the integral of t^(m-1) (1-t)^(n-m) for m hidden tokens of n."""
    lm = planned_lm(unit=1)
    text = span("one", "ab", 3)
    example = example_of(lm, text)
    made, model = objective(lm, [example]), lm.model
    places = example.written.nonzero()[:, 0]
    assert len(places) == 3
    losses: dict[tuple[bool, ...], float] = {}
    for pattern in itertools.product([False, True], repeat=3):
        hidden = torch.zeros_like(example.written)
        hidden[places] = torch.tensor(pattern)
        streams = made.streams_of(example, hide(example, hidden, 1.0))
        outcome = made.outcome(model, _batch([streams]))
        plan = outcome.metrics["loss_plan"][0]
        losses[pattern] = float(outcome.loss) - plan
    grid = torch.linspace(LEAST_LEVEL, 1, 20001, dtype=torch.float64)
    exact = 0.0
    for pattern, loss in losses.items():
        if count := sum(pattern):
            density = grid ** (count - 1) * (1 - grid) ** (3 - count)
            exact += loss * float(torch.trapezoid(density, grid)) / (1 - LEAST_LEVEL)
    draws = []
    for seed in range(6000):
        noise = some_noise(example, seed)
        pattern = tuple(noise.hidden[places].tolist())
        draws.append(losses[pattern] / float(noise.levels[places[0]]))
    mean, spread = _mean(draws), math.sqrt(_mean([(d - exact) ** 2 for d in draws]))
    assert mean == pytest.approx(exact, abs=4 * spread / math.sqrt(len(draws)))
    assert 4 * spread / math.sqrt(len(draws)) < 0.2 * exact


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _batch(streams: list[Any]) -> Any:
    from stretto.train.planned import NoisyBatch

    return NoisyBatch.of(streams)


# -- losses ----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_do_not_depend_on_packing_or_on_what_nothing_predicts(variant: str) -> None:
    lm = planned_lm(variant)
    maker = maker_of(lm)
    texts = [planned_text(lm, seed, rounds=2) for seed in range(3)]
    examples = [maker.from_annotated(prompt_ids(lm), text) for text in texts]
    made = objective(lm, examples)
    together = made.outcome(lm.model, made.batch((2, 3, 1)))
    alone = [made.outcome(lm.model, made.batch((turn,))) for turn in (1, 2, 3)]
    assert float(together.loss) == pytest.approx(sum(float(o.loss) for o in alone), rel=1e-5)
    assert together.num_terms == sum(o.num_terms for o in alone)
    noise = some_noise(examples[0], 9)
    whole, less = streams_of(lm, examples[0], noise), made.streams_of(examples[0], noise)
    assert len(less.example) < len(whole.example)
    losses = [made.outcome(lm.model, _batch([s])) for s in (whole, less)]
    assert float(losses[0].loss) == pytest.approx(float(losses[1].loss), rel=1e-5)


@torch.no_grad()
def test_the_two_losses_have_weights_and_one_of_weight_0_is_not_computed() -> None:
    lm = planned_lm()
    examples = [example_of(lm, TWO_ROUNDS)]
    both = objective(lm, examples)
    outcome = both.outcome(lm.model, both.batch((0,)))
    plan, spans = outcome.metrics["loss_plan"], outcome.metrics["loss_spans"]
    assert outcome.num_terms == plan[1] + spans[1] == 40 + plan[1]
    assert float(outcome.loss) == pytest.approx(plan[0] + spans[0], rel=1e-6)
    weighted = objective(lm, examples, weights=LossWeights(0.5, 2.0))
    halves = weighted.outcome(lm.model, weighted.batch((0,)))
    assert float(halves.loss) == pytest.approx(0.5 * plan[0] + 2 * spans[0], rel=1e-6)
    alone = objective(lm, examples, weights=LossWeights(spans=0))
    batch = alone.batch((0,))
    told = alone.outcome(lm.model, batch)
    assert float(told.loss) == pytest.approx(plan[0], rel=1e-5)
    assert told.num_terms == plan[1]
    assert batch.num_tokens < both.batch((0,)).num_tokens
    only = objective(lm, examples, weights=LossWeights(plan=0))
    last = only.outcome(lm.model, only.batch((0,)))
    assert float(last.loss) == pytest.approx(spans[0], rel=1e-5)
    assert (last.num_terms, "loss_plan" in last.metrics) == (40.0, False)
    for weights in ((-1, 1), (0, 0)):
        with pytest.raises(InvalidInput, match="weights"):
            LossWeights(*weights)


@torch.no_grad()
def test_main_is_learnt_alike_at_every_level() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    made = objective(lm, [example])
    told = {
        round(made.outcome(lm.model, made.batch((turn,))).metrics["loss_plan"][0], 3)
        for turn in range(6)
    }
    assert len(told) == 1


@torch.no_grad()
def test_a_text_without_spans_is_plain_fine_tuning() -> None:
    """The same objective, no block: transformers' own loss."""
    lm = tiny_lm("plain")
    prompt = prompt_ids(lm)
    example = maker_of(lm).from_annotated(prompt, "Paris is the capital of France")
    made = Planned(Renewed([example]), mask=0, shifted=True)
    outcome = made.outcome(lm.model, made.batch((0,)))
    ids = torch.cat([example.ids, torch.tensor([min(lm.vocabulary.end_ids)])])[None]
    labels = ids.clone()
    labels[0, : len(prompt)] = -100
    theirs = lm.model(input_ids=ids, labels=labels).loss
    count = ids.shape[1] - len(prompt)
    assert outcome.num_terms == count
    assert float(outcome.loss) / count == pytest.approx(float(theirs), rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_window_is_diffusion_alone(convention: str) -> None:
    """The same objective, one block without a plan: a loss written down without any of it."""
    lm = planned_lm(convention=convention)
    prompt, control = prompt_ids(lm), lm.card.control
    content = lm.vocabulary.encode("Paris is the capital")
    size = len(content) + 5
    example = maker_of(lm).from_window(prompt, "Paris is the capital", "row", Window(size, size))
    assert example.num_targets == size
    made = objective(lm, [example])
    noise = some_noise(example, 4)
    outcome = made.outcome(lm.model, _batch([made.streams_of(example, noise)]))

    clean = [*content, *[control["pad"]] * 5]
    hidden = noise.hidden[example.written].tolist()
    shown = [control["mask"] if h else t for h, t in zip(hidden, clean, strict=True)]
    ids = torch.tensor([[*prompt, control["async"], *shown, control["async_end"]]])
    n, m = ids.shape[1], len(prompt)
    mask = torch.ones(n, n).tril().bool()
    mask[m:, m:] = True
    logits = lm.model(input_ids=ids, attention_mask=mask[None, None]).logits[0].float()
    banned = [*control.values(), *lm.vocabulary.spare_ids, *lm.vocabulary.end_ids]
    legal = torch.ones(logits.shape[1], dtype=torch.bool)
    legal[banned] = False
    legal[[i for i in range(len(legal)) if i not in banned and not lm.vocabulary.decode([i])]] = (
        False
    )
    legal[control["pad"]] = True
    logits[:, ~legal] = -torch.inf
    logprobs = logits.log_softmax(-1)
    first = m + (0 if convention == "shifted" else 1)
    level = float(noise.levels[example.written][0])
    expected = -sum(float(logprobs[first + j, clean[j]]) / level for j in range(size) if hidden[j])
    assert sum(hidden) > 3
    assert float(outcome.loss) == pytest.approx(expected, rel=1e-4)
    assert outcome.num_terms == size


# -- trained = run ---------------------------------------------------------------------------------


class Passes:
    """An engine that keeps, of each pass, what blocks hold and the logits of their rows."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.recorder: Any = None
        self.seen: list[tuple[dict[str, list[int]], dict[tuple[str, int], torch.Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, runs: list[Any]) -> torch.Tensor:
        logits: torch.Tensor = self.engine.forward(runs)
        held = {s.thread: list(s.tokens) for s in self.recorder.segments if s.kind == "block"}
        rows: dict[tuple[str, int], torch.Tensor] = {}
        at = 0
        for run in runs:
            for index in run.kept:
                segment = self.recorder.segments[run.segment.handle]
                if segment.kind == "block":
                    rows[segment.thread, run.start + index] = logits[at].clone()
                at += 1
        self.seen.append((held, rows))
        return logits


def forced(lm: LM, text: str, method: Any = "auto", **params: Any) -> Passes:
    """A run that is made to write a text, its spans in the order the model likes best."""
    trace = maker_of(lm).parse(prompt_ids(lm), text).trace
    plan = [t for s in trace.response if s.thread == "main" for t in s.tokens]
    pad, spans = lm.card.control["pad"], {}
    for s in trace.segments:
        if s.kind == "block":
            content = [t for t, o in zip(s.tokens, s.origins, strict=True) if o == "sampled"]
            spans[s.thread] = [*content, *[pad] * (s.num_passes - len(content))]
    end = min(lm.vocabulary.end_ids)

    def script(thread: str, index: int) -> int | None:
        if thread == "main":
            return plan[index] if index < len(plan) else end
        return spans[thread][index]

    passes = Passes(lm.scheduler.engine)
    lm.scheduler.engine = passes
    stream = lm.submit(PROMPT, SamplingParams(max_tokens=900, **params), script=script)
    passes.recorder = stream.request.recorder
    completion = stream.finish()
    assert completion.finish_reason == "stop"
    return passes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_training_pass_computes_what_decoding_computes_in_that_state(
    variant: str, convention: str
) -> None:
    """In every state of every round, spans of a round being done at different steps."""
    lm = planned_lm(variant, convention)
    text = planned_text(lm, 11)
    passes = forced(lm, text, steps_ratio=0.3)
    example = example_of(lm, text)
    threads = [
        s.thread for s in maker_of(lm).parse(prompt_ids(lm), text).trace.segments
        if s.kind == "block"
    ]  # fmt: skip
    blocks = dict(zip(threads, example.is_block.nonzero()[:, 0].tolist(), strict=True))
    mask, worst, checked = lm.card.control["mask"], 0.0, set()
    for held, rows in passes.seen:
        if not rows:
            continue
        hidden = torch.zeros_like(example.written)
        for thread, tokens in held.items():
            of_block = (example.segment == blocks[thread]).nonzero()[:, 0]
            hidden[of_block] = torch.tensor([t == mask for t in tokens])
        streams = streams_of(lm, example, hide(example, hidden))
        logits = logits_of(lm.model, streams.example)
        for (thread, index), theirs in rows.items():
            copy = len(example.is_block) + threads.index(thread)
            row = int((streams.example.segment == copy).nonzero()[index, 0])
            worst = max(worst, float((logits[row] - theirs).abs().max()))
            is_target = int(streams.example.targets[row]) != IGNORE
            assert is_target
            checked.add(thread)
    assert checked == set(threads)
    assert worst < TOLERANCE


# -- turns, lengths, runs --------------------------------------------------------------------------


def test_a_turn_has_noise_of_its_own_whatever_it_is_packed_with() -> None:
    steps = PackedSteps([5] * 4, BatchSize(groups=3), pack_tokens=10, epochs=3, seed=1)
    turns = [
        t for s in range(steps.num_steps) for p in Turns(steps, [5] * 4, 10).packs(s) for t in p
    ]
    assert sorted(turns) == list(range(12))
    wide = Turns(steps, [5] * 4, 100)
    assert sorted(t for s in range(wide.num_steps) for p in wide.packs(s) for t in p) == sorted(
        turns
    )
    lm = planned_lm()
    made = objective(lm, [example_of(lm, TWO_ROUNDS)])
    ids = [made.streams(turn).example.ids for turn in (0, 1, 0)]
    assert torch.equal(ids[0], ids[2])
    assert ids[0].shape != ids[1].shape or not torch.equal(ids[0], ids[1])


def test_promises_are_lengthened_anew_in_each_epoch() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    renewed = Renewed([example], maker_of(lm), slack=0.5)
    sizes = [int(renewed.of_turn(t, generator_of(0, t)).written.sum()) for t in range(8)]
    assert sizes == [int(renewed.of_turn(t, generator_of(0, t)).written.sum()) for t in range(8)]
    assert min(sizes) >= 40
    assert len(set(sizes)) > 2
    assert all(size % 10 == 0 for size in sizes)
    longer = lengthened(TWO_ROUNDS, 10, lambda: 2)
    assert longer.count('tokens="30"') == 2
    assert 'tokens="40"' in longer
    assert Renewed([example], maker_of(lm)).of_turn(5, generator_of(0, 5)) is example


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_lm("plain").save(tmp_path_factory.mktemp("models") / "base")


def config_of(base: Path, rows: Path, out: Path, **changes: Any) -> SftConfig:
    own = {
        "model": str(base), "data": [str(rows)], "out": str(out), "dialect": "planned",
        "how": "full", "dtype": "float32", "batch": 4, "epochs": 2, "checkpoint_every": 1,
    }  # fmt: skip
    return SftConfig(**{**own, **changes})


def metrics_of(out: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_a_resumed_run_has_the_noise_that_it_would_have_had(base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", planned_rows())
    whole = train_sft(config_of(base, rows, tmp_path / "whole", slack=0.3))
    asked = iter(range(99))
    parts = config_of(base, rows, tmp_path / "parts", slack=0.3)
    assert not train_sft(parts, should_stop=lambda: next(asked) == 2)["is_complete"]
    assert train_sft(parts)["is_complete"]
    lines = metrics_of(tmp_path / "whole")
    assert metrics_of(tmp_path / "parts") == lines
    assert {"loss_plan", "loss_spans", "loss_hidden", "loss_sync"} <= lines[0].keys()
    assert whole["train"]["illegal_targets"] == 0
    assert LM.load(whole["model"]).card.variant == "sparse"


@pytest.mark.parametrize("how", ["lora", "full"])
def test_a_run_leaves_a_model_that_plans(base: Path, tmp_path: Path, how: str) -> None:
    bad = {**planned_rows(1)[0], "annotated": span("one", "much too long a text", 10), "sample": 1}
    rows = write_rows(tmp_path / "rows.jsonl", [*planned_rows(4), bad])
    made = {"variant": "dense", "convention": "aligned", "max_steps": 1}
    summary = train_sft(config_of(base, rows, tmp_path / how, how=how, **made))
    assert summary["train"]["rejected"] == {"span-too-long": 1}
    assert "span-too-long" in (tmp_path / how / "rejects.jsonl").read_text()
    lm = LM.load(summary["model"], dtype="float32")
    assert (lm.card.variant, lm.card.convention) == ("dense", "aligned")
    completion = lm.generate("question 0", SamplingParams(max_tokens=40))[0]
    assert completion.method == "planned"


def test_what_does_not_fit_is_refused_by_name() -> None:
    for settings, message in (
        ({"dialect": "pasta", "variant": "dense"}, "dialect pasta writes no spans, so variant"),
        ({"dialect": "planned", "baseline": True, "slack": 0.1}, "a baseline writes no spans"),
        ({"dialect": "planned", "block": 8}, "give window too"),
        ({"dialect": "planned", "window": 8, "slack": 0.1}, "leave slack out"),
        ({"dialect": "planned", "lengths": "exact"}, "planned has tens alone"),
    ):
        with pytest.raises(ValueError, match=message):
            SftConfig(**settings)
    assert "slack" not in SftConfig(dialect="pasta").resolved
    assert SftConfig(dialect="planned", slack=0.2).resolved["slack"] == 0.2


# -- answers without a plan ------------------------------------------------------------------------


def test_windows_hold_answers_in_blocks() -> None:
    lm = planned_lm()
    made = maker_of(lm)
    ids = lm.vocabulary.encode("Paris is")
    example = made.from_window(prompt_ids(lm), "Paris is", "row", Window(24, 4))
    assert int(example.is_block.sum()) == len(ids) // 4 + 1
    assert int((example.ids == lm.card.control["sync"]).sum()) == len(ids) // 4
    assert not (example.targets != IGNORE).any()
    with pytest.raises(WindowTooSmall, match="the window 4"):
        made.from_window(prompt_ids(lm), "Paris is", "row", Window(4, 4))
    with pytest.raises(InvalidInput, match="no whole number of blocks"):
        Window(10, 4)
    with pytest.raises(Unsupported, match="writes no blocks"):
        maker_of(tiny_lm("plain")).from_window([1], "a", "row", Window(4, 4))
    assert Window(12, 4).num_blocks(12) == 3
    assert Window(16, 4).num_blocks(12) == 4


@pytest.mark.parametrize("block", [None, 8])
def test_a_window_decodes_under_the_visibility_it_is_trained_under(block: int | None) -> None:
    lm = planned_lm()
    window = Window(24, 24 if block is None else block)
    text = "Paris is the"
    example = maker_of(lm).from_window(prompt_ids(lm), text, "row", window)
    content = example.ids[example.written].tolist()

    def script(thread: str, index: int) -> int | None:
        if thread == "main":
            return None
        return content[(int(thread.rpartition(".")[2]) - 1) * window.block + index]

    method = Diffusion(24, block)
    assert method.name == "diffusion,window=24" + ("" if block is None else f",block={block}")
    params = SamplingParams(max_tokens=100, threshold=0.5)
    completion = lm.submit(PROMPT, params, method=method, script=script).finish()
    assert (completion.text, completion.finish_reason) == (text, "stop")
    trace, size = completion.trace, len(example)
    ids, positions = flat_tokens(trace), flat_positions(trace)
    assert torch.equal(ids[:size], example.ids)
    assert torch.equal(positions[:size], example.positions)
    assert torch.equal(dense_mask(trace)[:size, :size], Batch.of([example]).visible())
    assert ids[size:].tolist() == ([] if block is None else [lm.card.control["sync"]])


def test_diffusion_is_spelt_like_other_methods() -> None:
    method = get_method("diffusion,window=24,block=8", "planned")
    assert (method, method.name) == (Diffusion(24, 8), "diffusion,window=24,block=8")
    for text, message in (
        ("diffusion", "needs a window"),
        ("diffusion,window=8,window=8", "each once"),
        ("diffusion,window=x", "window=N"),
        ("diffusion,budget=8", "window=N"),
        ("diffusion,window=10,block=4", "no whole number"),
    ):
        with pytest.raises(InvalidInput, match=message):
            get_method(text, "planned")
    with pytest.raises(UnknownName, match="diffusion"):
        get_method("diffusion,window=8", "pasta")


def test_a_model_that_writes_no_blocks_has_no_diffusion() -> None:
    lm = tiny_lm("plain")
    with pytest.raises(Unsupported, match="needs a model that writes blocks"):
        lm.submit(PROMPT, method=Diffusion(8))
    assert planned_lm().submit(PROMPT, SamplingParams(max_tokens=4), method=Diffusion(8)).finish(
    ).finish_reason == "length"  # fmt: skip


# -- it learns -------------------------------------------------------------------------------------


def test_training_teaches_to_plan_and_to_fill(tmp_path: Path) -> None:
    """A model from scratch has a row by heart, and writes all its spans at once."""
    text = f"{span('one', 'part', 10)}{span('two', 'second', 20)}<sync/>{span('sum', 'done', 10)}"
    trainee = make_tiny(
        "tiny-1m", sorted(set("question 0 part of it second done")), dialect="planned"
    )
    maker = trainee.maker()
    example = maker.from_annotated(trainee.encode_prompt("question 0"), text)
    made = Planned(Renewed([example] * 4), mask=trainee.card.control["mask"], shifted=True, seed=0)
    packed = PackedSteps([len(example)] * 4, BatchSize(groups=4), pack_tokens=900, epochs=130)
    settings = LoopSettings(schedule=Schedule(3e-3, warmup=5), checkpoint_every=None)
    Loop(trainee.model, made, Turns(packed, [len(example)] * 4, 900), settings, tmp_path).run()
    lm = LM.wrap(trainee.model, trainee.tokenizer, card=trainee.card, pool_slots=512)
    completion = lm.generate("question 0", SamplingParams(max_tokens=200))[0]
    assert completion.text == "partseconddone"
    assert [t.topic for t in completion.threads] == [None, "one", "two", "sum"]
    assert completion.usage.sequential_steps == completion.threads[0].num_tokens + 20 + 10


def test_pruning_leaves_nothing_where_nothing_is_predicted() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    only = objective(lm, [example], weights=LossWeights(plan=0))
    nothing = hide(example, torch.zeros_like(example.written), LEAST_LEVEL)
    streams = only.streams_of(example, nothing)
    assert len(streams.example) == 0
    batch = _batch([streams])
    outcome = only.outcome(tiny_model("llama"), batch)
    assert (float(outcome.loss.detach()), outcome.num_terms) == (0.0, 40.0)
    outcome.loss.backward()
    assert len(pruned(streams).example) == 0
