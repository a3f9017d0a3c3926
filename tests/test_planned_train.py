"""Training of dialect planned: what an example holds, what is masked of it, and who sees what."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from planned_kit import (
    CONVENTIONS,
    TWO_ROUNDS,
    VARIANTS,
    example_of,
    hide,
    logits_of,
    planned_lm,
    planned_text,
    prompt_ids,
    some_noise,
    span,
    streams_of,
)

from stretto.train.batches import Batch
from stretto.train.examples import IGNORE
from stretto.train.lengths import relabel
from stretto.train.noise import LEAST_LEVEL
from stretto.train.unusable import SpanTooLong

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
    assert int(example.in_span.sum()) == 40
    assert not example.in_span[[int(r[0]) for r in blocks] + [int(r[-1]) for r in blocks]].any()
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
    assert int(example_of(lm, relabel(text, lm.vocabulary, 10)).in_span.sum()) > 10


# -- who sees what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_copies_see_what_their_spans_see_and_no_clean_span_of_their_round(
    variant: str, seed: int
) -> None:
    """By the rule of the two streams, entry by entry."""
    lm = planned_lm(variant)
    example = example_of(lm, planned_text(lm, seed))
    streams = streams_of(lm, example, hide(example, example.in_span))
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
def test_what_is_predicted_is_masked_and_no_copy_of_it_is_in_view(
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
    early = example.in_span & (torch.arange(len(example)) < first_sync)
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
        both = streams_of(lm, example, hide(example, example.in_span)).example
        second = both.segment == int(both.segment.max())
        first = both.segment == int(both.segment.max()) - 1
        before = logits_of(lm.model, both)
        after = logits_of(lm.model, replace(both, ids=torch.where(first, 7, both.ids)))
        gaps.append(float((before[second] - after[second]).abs().max()))
    assert gaps[0] == 0.0
    assert gaps[1] > 1e-2


# -- noise -----------------------------------------------------------------------------------------


def test_tags_and_plans_are_never_masked_and_fillers_are() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    ever = torch.zeros(len(example), dtype=torch.bool)
    for seed in range(60):
        ever |= some_noise(example, seed).masked
    assert torch.equal(ever, example.in_span)
    assert bool((example.ids[ever] == lm.card.control["pad"]).any())
    with pytest.raises(ValueError, match="a block writes"):
        streams_of(lm, example, hide(example, torch.ones(len(example), dtype=torch.bool)))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_everything_counts_once_where_all_is_masked_and_nothing_where_nothing_is(
    convention: str,
) -> None:
    lm = planned_lm(convention=convention)
    example = example_of(lm, TWO_ROUNDS)
    whole = streams_of(lm, example, hide(example, example.in_span, 1.0))
    found = whole.example.targets[whole.is_copy]
    assert found[found != IGNORE].tolist() == example.ids[example.in_span].tolist()
    assert whole.weights[whole.is_copy].sum() == example.in_span.sum()
    none = streams_of(lm, example, hide(example, torch.zeros_like(example.in_span), LEAST_LEVEL))
    assert not (none.example.targets[none.is_copy] != IGNORE).any()


def test_levels_are_of_a_span_or_in_dense_of_a_round() -> None:
    for variant, distinct in (("sparse", 3), ("dense", 2)):
        example = example_of(planned_lm(variant), TWO_ROUNDS)
        levels = some_noise(example, 1).levels[example.in_span]
        assert len(levels.unique()) == distinct
        assert bool(((levels > LEAST_LEVEL) & (levels <= 1)).all())
