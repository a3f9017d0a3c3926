"""Means, intervals, and length-controlled win rates."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidInput
from stretto.eval import statistics
from stretto.eval.lcwr import Judged, difficulties, lc_win_rate

POSITIVE = st.floats(1e-3, 1e3)
PAIRS = st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=30)


@given(PAIRS)
def test_geometric_means_of_ratios_are_reciprocal(pairs: list[tuple[float, float]]) -> None:
    there = statistics.geometric_mean([a / b for a, b in pairs])
    back = statistics.geometric_mean([b / a for a, b in pairs])
    assert there == pytest.approx(1 / back, rel=1e-12)


@given(st.lists(POSITIVE, min_size=1, max_size=30))
def test_the_arithmetic_mean_is_never_below_the_geometric(values: list[float]) -> None:
    arithmetic, geometric = (f(values) for f in MEANS)
    assert arithmetic >= geometric * (1 - 1e-12)


MEANS = (statistics.arithmetic_mean, statistics.geometric_mean)


@settings(max_examples=20)
@given(st.lists(POSITIVE, min_size=1, max_size=30))
def test_intervals_hold_their_value_and_are_deterministic(values: list[float]) -> None:
    for estimate_of in (statistics.estimate_geometric, statistics.estimate_mean):
        estimate = estimate_of(values, 3)
        assert estimate == estimate_of(values, 3)
        assert estimate.value is not None
        assert estimate.low is not None
        assert estimate.high is not None
        assert min(values) * 0.999 <= estimate.low
        assert estimate.low <= estimate.value * 1.001
        assert estimate.value <= estimate.high * 1.001
        assert estimate.high <= max(values) * 1.001


def test_the_interval_is_that_of_the_normal_theory_for_many_values() -> None:
    values = np.random.default_rng(0).normal(5, 2, size=400)
    estimate = statistics.estimate_mean(values.tolist(), 0)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.03)
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.03)


def test_pairing_takes_out_what_both_sides_share() -> None:
    shared = np.random.default_rng(0).uniform(1, 100, size=50)
    a, b = (1.5 * shared).tolist(), shared.tolist()
    ratio = statistics.paired_ratio(a, b, 0)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    difference = statistics.paired_difference([x + 3 for x in b], b, 0)
    assert (difference.low, difference.high) == pytest.approx((3, 3))


def test_nothing_has_no_mean() -> None:
    assert statistics.estimate_geometric([], 0) == statistics.NOTHING
    assert statistics.estimate_mean([], 0) == statistics.NOTHING
    for values in ([], [1.0, 0.0], [-1.0], [math.nan]):
        with pytest.raises(InvalidInput, match="positive"):
            statistics.geometric_mean(values)
    with pytest.raises(InvalidInput, match="positive"):
        statistics.estimate_geometric([1.0, 0.0], 0)
    with pytest.raises(InvalidInput, match="at least one"):
        statistics.arithmetic_mean([])


# -- length control --------------------------------------------------------------------------------


def judged(wins: list[float], longer: list[int]) -> Judged:
    names = [f"p{i}" for i in range(len(wins))]
    return Judged(dict(zip(names, wins, strict=True)), dict(zip(names, longer, strict=True)))


def planted(model: float, length: float, size: int = 4000) -> Judged:
    """Verdicts drawn from the very model that is fitted, ours being longer by 300 characters."""
    rng = np.random.default_rng(1)
    longer = rng.normal(300, 300, size=size).astype(int)
    x = np.tanh(longer / longer.std(ddof=1))
    chance = 1 / (1 + np.exp(-(model + length * x)))
    return judged((rng.random(size) < chance).astype(float).tolist(), longer.tolist())


def test_a_model_against_itself_has_50() -> None:
    run = judged([0.5] * 20, [0] * 20)
    estimate = lc_win_rate(run, 0)
    assert (estimate.value, estimate.low, estimate.high) == (50.0, 50.0, 50.0)
    assert lc_win_rate(run, 0, difficulties([run, run])).value == pytest.approx(50)
    swapped = judged([1.0, 0.0] * 10, [40, -40] * 10)
    assert lc_win_rate(swapped, 0).value == pytest.approx(50, abs=1e-6)


def test_what_length_alone_has_won_is_taken_out() -> None:
    run = planted(model=-0.4, length=1.5)
    raw = 100 * sum(run.preferences.values()) / len(run.preferences)
    estimate = lc_win_rate(run, 0)
    assert raw > 55
    assert estimate.value == pytest.approx(100 / (1 + math.exp(0.4)), abs=3)
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low < estimate.value < estimate.high


def test_without_a_difference_in_length_the_rate_is_the_raw_one() -> None:
    run = judged([1.0] * 14 + [0.0] * 6, [7] * 20)
    assert lc_win_rate(run, 0).value == pytest.approx(70, abs=0.1)


def test_who_wins_everywhere_stays_below_100_and_finite() -> None:
    run = judged([1.0] * 10, list(range(10)))
    value = lc_win_rate(run, 0).value
    assert value is not None
    assert 90 < value < 100
    assert lc_win_rate(judged([0.0] * 10, [5] * 10), 0).value == pytest.approx(0, abs=1)
    assert lc_win_rate(judged([1.0], [3]), 0).value is not None
    assert lc_win_rate(judged([], []), 0) == statistics.NOTHING


def test_swapping_the_sides_mirrors_the_rate() -> None:
    rng = random.Random(0)
    wins = [rng.random() for _ in range(40)]
    longer = [rng.randint(-300, 300) for _ in range(40)]
    ours = lc_win_rate(judged(wins, longer), 0).value
    theirs = lc_win_rate(judged([1 - w for w in wins], [-n for n in longer]), 0).value
    assert ours == pytest.approx(100 - theirs)  # type: ignore[operator]


def test_prompts_that_all_runs_lose_are_hard() -> None:
    wins = [0.0] * 5 + [1.0] * 5
    runs = [judged(wins, [0] * 10), judged(wins, [0] * 10), judged([0.5] * 10, [0] * 10)]
    found = difficulties(runs)
    assert max(found[f"p{i}"] for i in range(5)) < 0 < min(found[f"p{i}"] for i in range(5, 10))
    assert difficulties(runs[:1]) == {}
