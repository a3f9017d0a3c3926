"""Drawing tokens: order of the filters, ties, and random numbers that depend on nothing else."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidInput
from stretto.params import SamplingParams
from stretto.runtime.sampler import Sampling, draw, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, -math.inf, 0.0])


def test_greedy_takes_the_best_and_the_lowest_id_of_ties() -> None:
    assert draw(LOGITS, Sampling(), 0.99) == 1
    assert draw(torch.tensor([0.0, 5.0, 5.0]), Sampling(), 0.5) == 1


def test_an_illegal_token_is_never_drawn() -> None:
    hot = Sampling(temperature=100.0)
    drawn = {draw(LOGITS, hot, k / 1000) for k in range(1000)}
    assert drawn == {0, 1, 2, 4}
    assert draw(torch.tensor([-math.inf, 0.0, -math.inf]), hot, 0.999999999) == 1
    assert draw(torch.tensor([-math.inf, 0.0, -math.inf]), hot, 0.0) == 1


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-309, 1.0, 1e300])
@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1.0, 1e39, 1e308])
@pytest.mark.parametrize("legal", [[5.0, 3.0], [-5.0, -3.0], [0.0, 2.0], [0.0, 0.0]])
def test_no_extreme_makes_an_illegal_token_drawable(
    temperature: float, penalty: float, legal: list[float]
) -> None:
    logits = torch.tensor([-math.inf, *legal, -math.inf])
    for cut in ({}, {"top_k": 1}, {"top_p": 0.5}):
        how = Sampling(temperature, repetition_penalty=penalty, **cut)
        for number in (0.0, 0.5, 0.999):
            assert draw(logits, how, number, {0, 1, 2}) in (1, 2)


def test_frequencies_are_the_softmax() -> None:
    counts = Counter(draw(LOGITS, Sampling(1.0), uniform(1, 0, "main", k)) for k in range(20_000))
    for token, probability in enumerate(torch.softmax(LOGITS.double(), 0).tolist()):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=0.012)


def test_top_k_and_top_p() -> None:
    hot = 50.0
    assert {draw(LOGITS, Sampling(hot, top_k=2), k / 100) for k in range(100)} == {1, 2}
    # probabilities .643 .237 .087 .032 : the first reaches .6, the first two .7
    assert {draw(LOGITS, Sampling(1.0, top_p=0.6), k / 100) for k in range(100)} == {1}
    assert {draw(LOGITS, Sampling(1.0, top_p=0.7), k / 100) for k in range(100)} == {1, 2}
    assert {draw(LOGITS, Sampling(1.0, top_p=1e-9), k / 100) for k in range(100)} == {1}
    even = torch.tensor([0.0, 0.0])  # the first has exactly half, which is enough
    assert {draw(even, Sampling(1.0, top_p=0.5), k / 100) for k in range(100)} == {0}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0, -1.5])
    assert draw(logits, Sampling(repetition_penalty=2.0), 0.0, {0}) == 1
    assert draw(logits[2:], Sampling(repetition_penalty=2.0), 0.0, {0}) == 1
    assert logits.tolist() == [2.0, 1.5, -1.0, -1.5]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-50, 50) | st.just(-math.inf), min_size=1, max_size=40),
    number=st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.01, 100),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.001, 1),
)
def test_what_is_drawn_is_always_legal(
    logits: list[float], number: float, temperature: float, top_k: int, top_p: float
) -> None:
    tensor = torch.tensor(logits)
    if not torch.isfinite(tensor).any():
        return
    token = draw(tensor, Sampling(temperature, top_k, top_p), number)
    assert math.isfinite(logits[token])


def test_random_numbers_depend_on_the_counter_alone() -> None:
    assert uniform(0, 0, "main", 0) == uniform(0, 0, "main", 0)
    keys = [
        (s, n, t, i) for s in (0, 1) for n in (0, 1) for t in ("main", "main.1") for i in (0, 1)
    ]
    assert len({uniform(*key) for key in keys}) == len(keys)
    mean = sum(uniform(3, 0, "main", k) for k in range(10_000)) / 10_000
    assert mean == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("repetition_penalty", 0),
        ("seed", 1.5),
        ("stop", ("",)),
        ("stop_ids", (-1,)),
        ("max_thread_tokens", 0),
        ("max_forks", -1),
    ],
)
def test_bad_parameters_are_named_with_their_value(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field.removesuffix("_ids")) as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


def test_zero_temperature_is_a_temperature_and_one_stop_string_is_one() -> None:
    params = SamplingParams(temperature=0, stop="END", stop_ids=[3])
    assert params.temperature == 0
    assert params.stop == ("END",)
    assert params.stop_ids == frozenset({3})
