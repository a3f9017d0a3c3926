"""The largest logit and its log-probability: the kernels' against the plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.kernels import library
from stretto.runtime.peak import peak, plain_peak
from stretto.runtime.quick import Row


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if not library.supported_weights():
        pytest.skip("this CPU has no instructions for the kernels")
    library.load()
    assert library.loaded() is not None


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.1, 4.0, 100.0]),
    share=st.sampled_from([0.0, 0.5, 0.99]),
    offset=st.sampled_from([0.0, -300.0, 1e6]),
)
def test_agrees_with_double_precision(
    size: int, seed: int, spread: float, share: float, offset: float
) -> None:
    rng = np.random.default_rng(seed)
    row = (spread * rng.standard_normal(size) + offset).astype(np.float32)
    hidden = rng.random(size) < share
    hidden[rng.integers(size)] = False
    row[hidden] = -np.inf
    best, logprob = peak(row)
    assert best == int(row.argmax())
    exact = row.astype(np.float64)
    assert logprob == pytest.approx(-math.log(np.exp(exact - exact.max()).sum()), abs=2e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_the_plain_ones_affair(value: float) -> None:
    row = np.full(40, value, dtype=np.float32)
    assert _outcome(peak, row) == _outcome(plain_peak, row)
    row[3] = 1.0
    assert _outcome(peak, row) == _outcome(plain_peak, row)


def test_every_other_number_of_a_longer_row() -> None:
    row = np.arange(64, dtype=np.float32)
    assert peak(row[::2]) == plain_peak(np.ascontiguousarray(row[::2]))


def _outcome(function: Callable[[Row], tuple[int, float]], row: Row) -> object:
    """What it returns, comparable also where that is NaN; or what it raises."""
    try:
        best, logprob = function(row)
    except ValueError as error:
        return str(error)
    return best, "NaN" if math.isnan(logprob) else logprob
