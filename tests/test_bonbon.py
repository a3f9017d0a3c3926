"""The BoNBoN loss: margins, zero gradients, pure terms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stretto.errors import InvalidInput
from stretto.train.bonbon import BonbonLoss, bonbon_loss, margin_of


def tensors(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([v], requires_grad=i < 2) for i, v in enumerate(values)]


def loss_at(
    gap: float, *, margin: float = 5.5, alpha: float = 0.0
) -> tuple[BonbonLoss, float, float]:
    """The loss where the log-ratio gap is `gap`, and its slope in either log-prob."""
    best, worst, reference_best, reference_worst = tensors(-40.0 + gap, -60.0, -50.0, -70.0)
    found = bonbon_loss(best, worst, reference_best, reference_worst, margin=margin, alpha=alpha)
    found.loss.backward()
    assert best.grad is not None
    assert worst.grad is not None
    return found, float(best.grad), float(worst.grad)


@pytest.mark.parametrize(("n", "margin"), [(2, 1.0), (4, 5.5), (8, 18.15), (10, 25.4607)])
def test_margins(n: int, margin: float) -> None:
    """Invariant 30."""
    assert margin_of(n) == pytest.approx(margin, abs=5e-5)


def test_the_margin_is_half_the_inverse_of_the_papers_beta() -> None:
    beta_8 = 0.0275482
    assert 1 / (2 * beta_8) == pytest.approx(margin_of(8), rel=1e-6)
    with pytest.raises(InvalidInput, match="at least 2"):
        margin_of(1)


@pytest.mark.parametrize("n", [2, 4, 10])
def test_the_margin_is_what_best_of_n_does_to_the_log_ratio(n: int) -> None:
    """Best-of-n has density n F^(n-1) of the samples' own, worst-of-n n (1-F)^(n-1): the expected
    gap of the first's log-ratios is the margin."""
    uniform = np.random.default_rng(0).random((200_000, n))
    gap = (n - 1) * (np.log(uniform.max(1)) - np.log(uniform.min(1)))
    assert gap.mean() == pytest.approx(margin_of(n), rel=0.01)


def test_the_gradient_is_zero_at_the_margin_and_turns_there() -> None:
    """Invariant 31."""
    at, below, above = loss_at(5.5), loss_at(4.0), loss_at(7.0)
    assert float(at[0].loss.detach()) == 0
    assert at[1:] == (0, 0)
    assert below[1] == -3.0  # raising the best lowers the loss: 2 (h - margin)
    assert below[2] == 3.0
    assert above[1] == 3.0


def test_a_policy_that_is_the_reference_pays_the_margin_squared() -> None:
    found, *_ = loss_at(0.0, margin=margin_of(10))
    assert float(found.ipo) == pytest.approx(margin_of(10) ** 2)
    assert float(found.gap) == 0


def test_alpha_one_is_supervised_training_on_the_best_alone() -> None:
    found, best, worst = loss_at(2.0, alpha=1.0)
    assert float(found.loss.detach()) == 38
    assert (best, worst) == (-1, 0)


def test_alpha_zero_is_ipo_alone() -> None:
    found, *_ = loss_at(2.0, alpha=0.0)
    assert float(found.loss.detach()) == pytest.approx(3.5**2)


def test_between_them_the_terms_are_weighed() -> None:
    found, best, _ = loss_at(2.0, alpha=0.25)
    assert float(found.loss.detach()) == pytest.approx(0.25 * 38 + 0.75 * 3.5**2)
    assert best == pytest.approx(0.25 * -1 + 0.75 * 2 * (2.0 - 5.5))


def test_the_loss_is_the_mean_over_pairs_each_with_its_margin() -> None:
    best = torch.tensor([-10.0, -20.0])
    worst = torch.tensor([-12.0, -21.0])
    zero = torch.zeros(2)
    found = bonbon_loss(best, worst, zero, zero, margin=torch.tensor([1.0, 5.5]), alpha=0.0)
    assert float(found.loss.detach()) == pytest.approx(((2 - 1) ** 2 + (1 - 5.5) ** 2) / 2)
    assert found.metrics() == {
        "sft": 15.0, "ipo": pytest.approx(10.625), "gap": 1.5, "accuracy": 1.0, "best": -15.0,
        "worst": -16.5,
    }  # fmt: skip


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_alpha_is_held_to_its_range(alpha: float) -> None:
    zero = torch.zeros(1)
    with pytest.raises(InvalidInput, match="alpha must be from 0 to 1"):
        bonbon_loss(zero, zero, zero, zero, margin=1.0, alpha=alpha)
