"""BoNBoN: from pairs of best and worst of n samples to a model that writes the best of n.

Gui et al. 2024 (BoNBoN alignment), as PASTA uses it (thesis 3.4), with sums over tokens:

    L = -alpha log p(y+|x) + (1 - alpha) (h - margin)^2
    h = [log p(y+|x) - log p(y-|x)] - [log p0(y+|x) - log p0(y-|x)]

p0 is the reference: the model that drew the samples. Under best-of-n sampling the expected h is
(n-1) H_{n-1} with H_m = 1 + 1/2 + ... + 1/m, which is the margin. IPO (Azar et al. 2023) writes it
1 / (2 beta) or 1 / (2 tau), PASTA 1 / beta; the margin is the parameter here, so nothing is
halved by mistake. Averages over tokens instead of sums would put it out of reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from stretto.errors import InvalidInput

DEFAULT_ALPHA = 0.005


def margin_of(n: int) -> float:
    """(n-1) H_{n-1}: 1 for n = 2, 5.5 for 4, 18.15 for 8, 25.4607 for 10.

    Raises `InvalidInput` for fewer than two samples.
    """
    if n < 2:
        raise InvalidInput(f"best and worst of {n} samples are the same; take at least 2")
    return (n - 1) * sum(1 / k for k in range(1, n))


@dataclass(frozen=True)
class BonbonLoss:
    """The loss and what it is made of, averaged over pairs; `loss` has the gradient.

    `sft`: -log p(y+|x). `ipo`: (h - margin)^2. `gap`: h. `accuracy`: the share of pairs with h > 0.
    `best`, `worst`: log-probs under the policy.
    """

    loss: Float[Tensor, ""]
    sft: Float[Tensor, ""]
    ipo: Float[Tensor, ""]
    gap: Float[Tensor, ""]
    accuracy: Float[Tensor, ""]
    best: Float[Tensor, ""]
    worst: Float[Tensor, ""]

    def metrics(self) -> dict[str, float]:
        names = ("sft", "ipo", "gap", "accuracy", "best", "worst")
        return {name: float(getattr(self, name)) for name in names}


def bonbon_loss(
    best: Float[Tensor, "pairs"],
    worst: Float[Tensor, "pairs"],
    reference_best: Float[Tensor, "pairs"],
    reference_worst: Float[Tensor, "pairs"],
    *,
    margin: float | Float[Tensor, "pairs"],
    alpha: float = DEFAULT_ALPHA,
) -> BonbonLoss:
    """The BoNBoN loss of pairs from sequence log-probs: sums over tokens, float32.

    `alpha` 1 is supervised training on y+ alone, 0 pure IPO. Raises `InvalidInput` for an alpha
    outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise InvalidInput(f"alpha must be from 0 to 1, got {alpha}; PASTA's is {DEFAULT_ALPHA}")
    gap = (best - worst) - (reference_best - reference_worst)
    sft, ipo = -best, (gap - margin) ** 2
    return BonbonLoss(
        loss=(alpha * sft + (1 - alpha) * ipo).mean(),
        sft=sft.detach().mean(),
        ipo=ipo.detach().mean(),
        gap=gap.detach().mean(),
        accuracy=(gap.detach() > 0).float().mean(),
        best=best.detach().mean(),
        worst=worst.detach().mean(),
    )
