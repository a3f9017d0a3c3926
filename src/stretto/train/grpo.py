"""GRPO (Shao et al. 2024) as an objective of the loop: the loss of rollouts, given advantages.

Log-probs are taken under the very visibility and masks in force when each token was drawn, so the
importance ratio is 1 until the weights have changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from stretto.errors import InvalidInput
from stretto.train.batches import Batch
from stretto.train.examples import Example
from stretto.train.grpo_advantages import Advantage
from stretto.train.logprobs import token_logprobs
from stretto.train.objective import Share
from stretto.train.targets import CLASSES

Aggregation = Literal["dapo", "grpo", "dr_grpo"]
AGGREGATIONS: tuple[Aggregation, ...] = ("dapo", "grpo", "dr_grpo")

TEXT = tuple(CLASSES.index(name) for name in ("content", "end"))
"""Classes of targets that are no annotation."""


@dataclass(frozen=True)
class LossSettings:
    """The clipped surrogate (Schulman et al. 2017) and how tokens add up.

    Ratios are clipped to 1 - `clip_low` and 1 + `clip_high`. `beta` weighs the KL divergence from
    the model that training began with, estimated by k3 (Schulman 2020). `aggregation`: dapo is the
    mean over all tokens of a step (Yu et al. 2025), grpo that over answers of their means, dr_grpo
    that over answers of their sums by `max_tokens` (Liu et al. 2025). With `kv_tokens` control the
    advantage for KV is that of annotation tokens alone.
    """

    max_tokens: int
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    aggregation: Aggregation = "dapo"
    kv_tokens: Literal["all", "control"] = "all"

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            known = ", ".join(AGGREGATIONS)
            raise InvalidInput(f"aggregation is {self.aggregation!r}; known: {known}")
        if not (0 < self.clip_low < 1 and 0 < self.clip_high < math.inf):
            raise InvalidInput(
                f"ratios are clipped to 1 - {self.clip_low} and 1 + {self.clip_high}; the former "
                "must be from 0 to 1, the latter more than 1"
            )
        if not 0 <= self.beta < math.inf:
            raise InvalidInput(f"beta is {self.beta}; it must be a number from 0 on")

    @property
    def counts_tokens(self) -> bool:
        """Whether a term of the loss is a token; else it is an answer."""
        return self.aggregation == "dapo"


@dataclass(frozen=True, eq=False)
class PolicyExample:
    """A rollout ready for training. `old`, `reference`: log-probs of its targets, in order, under
    the policy that drew it and under the model that training began with (None without `beta`)."""

    example: Example
    old: Float[Tensor, "targets"]
    advantage: Advantage
    reference: Float[Tensor, "targets"] | None = None

    def __len__(self) -> int:
        return len(self.example)


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """Rollouts laid end to end; the tensors are one number a target, in the order of its rows."""

    batch: Batch
    old: Float[Tensor, "targets"]
    score_advantage: Float[Tensor, "targets"]
    kv_advantage: Float[Tensor, "targets"]
    reference: Float[Tensor, "targets"] | None

    @classmethod
    def of(cls, rollouts: Sequence[PolicyExample]) -> PolicyBatch:
        batch = Batch.of([r.example for r in rollouts])
        references = [r.reference for r in rollouts if r.reference is not None]
        parts = torch.tensor([[r.advantage.score, r.advantage.kv] for r in rollouts])
        score, kv = parts[batch.owner].unbind(1)
        return cls(
            batch=batch,
            old=torch.cat([r.old for r in rollouts]),
            score_advantage=score,
            kv_advantage=kv,
            reference=torch.cat(references) if references else None,
        )

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens

    def to(self, device: torch.device | str) -> PolicyBatch:
        return replace(
            self,
            batch=self.batch.to(device),
            old=self.old.to(device),
            score_advantage=self.score_advantage.to(device),
            kv_advantage=self.kv_advantage.to(device),
            reference=None if self.reference is None else self.reference.to(device),
        )

    def advantage(self, settings: LossSettings) -> Float[Tensor, "targets"]:
        if settings.kv_tokens == "all":
            return self.score_advantage + self.kv_advantage
        text = torch.tensor(TEXT, device=self.old.device)
        is_annotation = ~torch.isin(self.batch.classes, text)
        return self.score_advantage + self.kv_advantage * is_annotation


@dataclass(frozen=True)
class PolicyLoss:
    """The loss summed over `num_terms`, and sums over tokens for people."""

    loss: Tensor
    num_terms: float
    metrics: dict[str, Share]


def policy_loss(model: Any, rollouts: PolicyBatch, settings: LossSettings) -> PolicyLoss:
    """The loss of a batch under the model as it is.

    Metrics: `clipped`, the share of tokens whose ratio is clipped; `ratio_gap`, the mean of
    |ratio - 1|; `kl_old` and with `beta` `kl`, the divergences from the policy that drew them and
    from the reference, by k3.
    """
    logprobs = token_logprobs(model, rollouts.batch)
    advantage = rollouts.advantage(settings)
    log_ratio = logprobs - rollouts.old
    ratio = log_ratio.exp()
    held = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    losses = -torch.minimum(ratio * advantage, held * advantage)
    clipped = (ratio != held) & (held * advantage < ratio * advantage)
    count = float(len(logprobs))
    sums = {
        "clipped": clipped.sum(),
        "ratio_gap": (ratio - 1).abs().sum(),
        "kl_old": k3(logprobs, rollouts.old).sum(),
    }
    if rollouts.reference is not None:
        divergence = k3(logprobs, rollouts.reference)
        losses = losses + settings.beta * divergence
        sums["kl"] = divergence.sum()
    metrics = {name: (float(total.detach()), count) for name, total in sums.items()}
    loss, num_terms = _aggregate(losses, rollouts.batch, settings)
    return PolicyLoss(loss, num_terms, metrics)


def k3(logprobs: Tensor, others: Tensor) -> Tensor:
    """Of each token exp(d) - d - 1, d being the others' log-prob minus the own: an unbiased, never
    negative estimate of the divergence of the policy from the others."""
    gap = others - logprobs
    return torch.expm1(gap) - gap


def _aggregate(losses: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, float]:
    """(the sum over terms, their number)."""
    if settings.counts_tokens:
        return losses.sum(), float(len(losses))
    if settings.aggregation == "dr_grpo":
        return losses.sum() / settings.max_tokens, float(batch.num_examples)
    lengths = torch.bincount(batch.owner, minlength=batch.num_examples)
    return (losses / lengths[batch.owner]).sum(), float(batch.num_examples)
