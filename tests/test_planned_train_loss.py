"""What the objective of dialect planned adds up, against losses that are written down by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import tiny_model
from planned_kit import (
    CONVENTIONS,
    TWO_ROUNDS,
    VARIANTS,
    example_of,
    hide,
    loss_by_hand,
    maker_of,
    objective,
    planned_lm,
    planned_text,
    prompt_ids,
    some_noise,
    span,
    streams_of,
)
from tiny_lms import tiny_lm

from stretto.errors import InvalidInput
from stretto.methods.diffusion import Window
from stretto.train.noise import LEAST_LEVEL, Noise, pruned
from stretto.train.planned import LossWeights, NoisyBatch, Planned
from stretto.train.renewed import Renewed

NUM_TURNS = 3000

# -- by hand ---------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_window_is_diffusion_alone(convention: str) -> None:
    """The same objective, one block without a plan."""
    lm = planned_lm(convention=convention)
    prompt, pad = prompt_ids(lm), lm.card.control["pad"]
    content = lm.vocabulary.encode("Paris is the capital")
    size = len(content) + 5
    example = maker_of(lm).from_window(prompt, "Paris is the capital", "row", Window(size, size))
    assert example.num_targets == size
    made = objective(lm, [example])
    noise = some_noise(example, 4)
    outcome = made.outcome(lm.model, NoisyBatch.of([made.streams_of(example, noise)]))
    masked = noise.masked[example.in_span].tolist()
    level = float(noise.levels[example.in_span][0])
    expected = loss_by_hand(lm, prompt, [([*content, *[pad] * 5], masked, level)])
    assert sum(masked) > 3
    assert float(outcome.loss) == pytest.approx(expected, rel=1e-4)
    assert outcome.num_terms == size


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_each_span_is_weighed_by_its_own_level(variant: str, convention: str) -> None:
    lm = planned_lm(variant, convention)
    example = example_of(lm, span("one", "Paris is", 10) + span("two", "the capital", 20))
    made = objective(lm, [example])
    blocks = example.is_block.nonzero()[:, 0].tolist()
    levels = torch.where(example.segment == blocks[0], 0.2, 0.8)
    masked = example.in_span & (torch.arange(len(example)) % 3 != 0)
    outcome = made.outcome(
        lm.model, NoisyBatch.of([made.streams_of(example, Noise(masked, levels))])
    )
    own = [example.in_span & (example.segment == block) for block in blocks]
    spans = [(example.ids[rows].tolist(), masked[rows].tolist()) for rows in own]
    before = example.ids[~example.is_block[example.segment]].tolist()

    def expected(first: float, second: float) -> float:
        return loss_by_hand(lm, before, [(*spans[0], first), (*spans[1], second)])

    found, count = outcome.metrics["loss_spans"]
    assert count == 30
    assert found == pytest.approx(expected(0.2, 0.8), rel=1e-4)
    assert expected(0.2, 0.2) - found > 10
    assert found - expected(0.8, 0.8) > 10


# -- over levels and masks -------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_mask_counts_what_it_counts_by_hand(convention: str) -> None:
    lm = planned_lm(convention=convention)
    prompt, text, clean = [7], "ab", three_tokens()
    example = maker_of(lm).from_window(prompt, text, "row", Window(3, 3))
    made = objective(lm, [example])
    for pattern in itertools.product([False, True], repeat=3):
        masked = torch.zeros_like(example.in_span)
        masked[example.in_span] = torch.tensor(pattern)
        noise = hide(example, masked, 0.25)
        outcome = made.outcome(lm.model, NoisyBatch.of([made.streams_of(example, noise)]))
        expected = loss_by_hand(lm, prompt, [(clean, list(pattern), 0.25)])
        assert float(outcome.loss) == pytest.approx(expected, rel=1e-4), pattern
        assert outcome.num_terms == 3


@torch.no_grad()
def test_the_expected_loss_is_that_of_all_masks() -> None:
    """Turns with levels and masks as they are drawn, through the objective, have the mean that the
    sum over all masks has, each with its exact weight: the integral over the levels t of
    t^(m-1) (1-t)^(3-m) where m of three tokens are masked. Its losses are computed by hand."""
    lm = planned_lm()
    prompt, clean = [7], three_tokens()
    exact = 0.0
    for pattern in itertools.product([False, True], repeat=3):
        if count := sum(pattern):
            loss = loss_by_hand(lm, prompt, [(clean, list(pattern), 1.0)])
            exact += loss * mean_over_levels(lambda t, m=count: t ** (m - 1) * (1 - t) ** (3 - m))
    made = objective(lm, [maker_of(lm).from_window(prompt, "ab", "row", Window(3, 3))])
    outcomes = [
        made.outcome(lm.model, made.batch(tuple(range(first, first + 500))))
        for first in range(0, NUM_TURNS, 500)
    ]
    assert sum(outcome.num_terms for outcome in outcomes) == 3 * NUM_TURNS
    # The standard error of the mean is 2.6 %: sqrt(3 (E[1/t] - 1)) of a token's loss, each turn.
    mean = sum(float(outcome.loss) for outcome in outcomes) / NUM_TURNS
    assert mean == pytest.approx(exact, rel=0.08)


def three_tokens() -> list[int]:
    """The text `ab`, and a filler."""
    lm = planned_lm()
    ids = [*lm.vocabulary.encode("ab"), lm.card.control["pad"]]
    assert len(ids) == 3
    return ids


def mean_over_levels(value: Callable[[float], float]) -> float:
    """Of a polynomial of degree 3 at most: two nodes of Gauss and Legendre are exact."""
    nodes, weights = np.polynomial.legendre.leggauss(2)
    levels = LEAST_LEVEL + (1 - LEAST_LEVEL) * (nodes + 1) / 2
    return float(sum(w / 2 * value(float(t)) for w, t in zip(weights, levels, strict=True)))


# -- sums ------------------------------------------------------------------------------------------


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
    losses = [made.outcome(lm.model, NoisyBatch.of([s])) for s in (whole, less)]
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


def test_pruning_leaves_nothing_where_nothing_is_predicted() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    only = objective(lm, [example], weights=LossWeights(plan=0))
    nothing = hide(example, torch.zeros_like(example.in_span), LEAST_LEVEL)
    streams = only.streams_of(example, nothing)
    assert len(streams.example) == 0
    batch = NoisyBatch.of([streams])
    outcome = only.outcome(tiny_model("llama"), batch)
    assert (float(outcome.loss.detach()), outcome.num_terms) == (0.0, 40.0)
    outcome.loss.backward()
    assert len(pruned(streams).example) == 0
