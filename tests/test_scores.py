"""Scores: speed by structure, quality, redundant branches, flaws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.rows import Answer
from stretto.errors import InvalidInput, UnknownName
from stretto.train.scores import (
    VARIANTS,
    Speed,
    branches_of,
    flaws_of,
    parse_lambda,
    redundant_branches,
    score,
    show_lambda,
)

CONTROL = {
    "promise": 100, "tokens": 101, "promise_end": 102, "async": 103, "async_end": 104, "sync": 105,
}  # fmt: skip


def promise(*text: int) -> list[int]:
    return [100, 7, 101, 3, 102, 103, *text, 104]


def answer(ids: list[int], reason: str = "stop", *, forced: bool = False) -> Answer:
    origins = "".join("i" if t == 103 else "s" for t in ids)
    return Answer(
        prompt_id="0" * 16,
        text="some text",
        finish_reason=reason,
        ids=ids,
        origins=origins[:-1] + "f" if forced else origins,
        num_prompt_tokens=3,
        sequential_steps=9,
        completion_tokens=9,
        control_tokens=0,
    )


def test_a_sequential_answer_has_parallelism_one_and_its_share_of_the_baseline() -> None:
    speed = Speed(baseline_tokens=120, text_tokens=60, steps=60)
    assert speed.parallelism == 1
    assert speed.speedup == 2


def test_control_tokens_count_in_the_path_and_not_in_the_text() -> None:
    """Invariant 26: 40 text tokens in 20 steps, of which 8 drew control tokens."""
    speed = Speed(baseline_tokens=30, text_tokens=40, steps=20)
    assert speed.speedup == 1.5
    assert speed.parallelism == 2
    assert speed.harmonic == pytest.approx(2 * 1.5 * 2 / 3.5)
    assert speed.arithmetic == 1.75
    assert speed.matched == min(speed.parallelism, speed.speedup)


def test_a_redundant_branch_raises_parallelism_and_not_speedup() -> None:
    """Invariant 27: the same path, one more branch of 20 tokens beside a longer one; its promise
    costs main steps that the path does not see."""
    without = Speed(baseline_tokens=60, text_tokens=60, steps=40)
    with_branch = Speed(baseline_tokens=60, text_tokens=80, steps=40)
    assert with_branch.by("parallelism") > without.by("parallelism")
    assert with_branch.by("speedup") == without.by("speedup")


def test_no_steps_is_no_speed() -> None:
    assert [Speed(10, 0, 0).by(v) for v in VARIANTS] == [0] * len(VARIANTS)
    with pytest.raises(UnknownName, match="did you mean 'speedup'"):
        Speed(1, 1, 1).by("sppedup")


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 500))
def test_means_lie_between_what_they_are_of(baseline: int, text: int, steps: int) -> None:
    speed = Speed(baseline, text, steps)
    low, high = sorted([speed.speedup, speed.parallelism])
    slack = 1e-9 * high
    assert low - slack <= speed.harmonic <= speed.arithmetic + slack
    assert speed.arithmetic <= high + slack


def test_lambda_weighs_quality_from_nothing_to_alone() -> None:
    """Invariant 29, the first half."""
    assert score(2.0, 3.0, 0) == 2
    assert score(2.0, 3.0, 4) == 14
    assert score(2.0, 3.0, math.inf) == 3
    assert score(2.0, -3.0, math.inf) == -3


def test_a_missing_quality_is_missed_only_where_it_is_needed() -> None:
    assert score(2.0, None, 0) == 2
    assert score(2.0, None, 1) is None
    assert score(2.0, None, math.inf) is None


@pytest.mark.parametrize("text", ["-1", "nan", "fast", "", "-inf"])
def test_lambda_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(InvalidInput, match="lambda must be a number from 0 on"):
        parse_lambda(text)


@given(st.floats(0, allow_nan=False, allow_infinity=True))
def test_lambda_comes_back_from_its_text(lam: float) -> None:
    assert parse_lambda(show_lambda(lam)) == lam


def test_lambda_texts_are_short() -> None:
    assert [show_lambda(x) for x in (4.0, 0.5, math.inf)] == ["4", "0.5", "inf"]


# -- redundant branches ----------------------------------------------------------------------------


def test_a_branch_that_says_what_a_sibling_says_is_redundant() -> None:
    texts = [
        "the cat sat on the mat",
        "the cat sat on the rug",  # 3 of its 4 runs of three are the first's
        "dogs bark at night when hungry",
    ]
    first, second, third = (text.split() for text in texts)
    assert redundant_branches([first, second, third]) == [1]
    assert redundant_branches([first, third]) == []


def test_of_two_equal_branches_the_second_is_redundant() -> None:
    assert redundant_branches([[1, 2], [1, 2]]) == [1]
    assert redundant_branches([[1, 2], [1, 3]]) == []


def test_half_of_a_branch_in_a_longer_one_is_enough_and_less_is_not() -> None:
    longer = list(range(10))
    assert redundant_branches([longer, [0, 1, 2, 3, 90, 91]]) == [1]  # 2 of 4 runs
    assert redundant_branches([longer, [0, 1, 2, 90, 91, 92]]) == []  # 1 of 4


def test_an_empty_branch_is_redundant() -> None:
    assert redundant_branches([[], [1, 2, 3, 4]]) == [0]


def test_branches_are_cut_at_their_tags() -> None:
    ids = [1, *promise(10, 11), 2, *promise(12), 105, 3]
    assert branches_of(ids, CONTROL) == [[10, 11], [12]]
    assert branches_of([1, 2, 3], {}) == []
    assert branches_of([100, 7, 101, 3, 102, 103, 10], CONTROL) == [[10]]


# -- flaws -----------------------------------------------------------------------------------------


def test_a_whole_answer_has_no_flaw() -> None:
    assert flaws_of(answer([1, *promise(10, 11), 2, 105, 3]), CONTROL) == []
    assert flaws_of(answer([1, 2, 3]), {}) == []


def test_cut_answers_are_told_apart_by_where_they_were_cut() -> None:
    assert flaws_of(answer([1, 2], "length"), CONTROL) == ["cut"]
    assert flaws_of(answer([1, 100, 7], "length"), CONTROL) == ["cut"]
    assert flaws_of(answer([1, 100, 7, 101, 3, 102, 103, 8], "length"), CONTROL) == [
        "cut",
        "unclosed",
    ]
    two_open = [100, 7, 101, 3, 102, 103, 8, 100, 7, 101, 3, 102, 103, 9]
    assert flaws_of(answer(two_open, "length"), CONTROL) == ["cut", "unclosed"]
    assert flaws_of(answer(promise(10), forced=True), CONTROL) == ["cut-branch"]


@pytest.mark.parametrize(
    "ids",
    [
        [104],
        [101],
        [102],
        [103],
        [100, 7, 105],
        [100, 7, 101, 102, 103, 104],
        [100, 7, 101, 3, 102, 5],
        [100, 7, 101, 3, 102, 103, 100],
        [100, 7, 101, 3, 102],
    ],
)
def test_what_no_grammar_allows_is_malformed(ids: list[int]) -> None:
    assert "malformed" in flaws_of(answer([1, *ids]), CONTROL)


def test_other_dialects_have_no_such_grammar() -> None:
    assert flaws_of(answer([1, 103, 2]), {"fork": 103, "child": 104}) == []


def test_no_text_is_a_flaw() -> None:
    assert flaws_of(answer([1]).model_copy(update={"text": " \n"}), CONTROL) == ["empty"]
