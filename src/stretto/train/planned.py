"""Planned Diffusion's objective: plans learnt token after token, spans from what is masked of them.

Two losses in one pass over two streams (`train.noise`): the cross-entropy of main's tokens, and of
the masked tokens of blocks, each over the level of its block. Their sum is over the tokens that
either is about: main's targets, and all tokens of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stretto.errors import InvalidInput
from stretto.train.batches import Batch
from stretto.train.examples import IGNORE, Example
from stretto.train.logprobs import token_logprobs
from stretto.train.noise import (
    Noise,
    Streams,
    draw_noise,
    generator_of,
    pruned,
    with_copies,
    without_main,
)
from stretto.train.objective import Outcome, Share
from stretto.train.packing import Pack
from stretto.train.renewed import Renewed
from stretto.train.targets import CLASSES


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Of the two losses. One of weight 0 is neither computed nor counted."""

    plan: float = 1.0
    spans: float = 1.0

    def __post_init__(self) -> None:
        if min(self.plan, self.spans) < 0 or not self.plan + self.spans > 0:
            raise InvalidInput(
                f"the weights of the two losses are {self.plan} and {self.spans}; neither may be "
                "negative, and one must be above 0"
            )


@dataclass(frozen=True, eq=False)
class NoisyBatch:
    """Two streams of several examples as one sequence. With `batch.rows` goes `is_copy`, and
    `weights` with those of copies. `batch` is None if nothing is predicted; `num_span_tokens`:
    tokens of blocks."""

    batch: Batch | None
    weights: Float[Tensor, "masked"]
    is_copy: Bool[Tensor, "targets"]
    num_span_tokens: int

    @classmethod
    def of(cls, streams: Sequence[Streams]) -> NoisyBatch:
        kept = [s for s in streams if len(s.example)]
        rows = [s.example.targets != IGNORE for s in kept]
        empty = torch.zeros(0)
        return cls(
            Batch.of([s.example for s in kept]) if kept else None,
            torch.cat(
                [empty, *(s.weights[r & s.is_copy] for s, r in zip(kept, rows, strict=True))]
            ),
            torch.cat([empty.bool(), *(s.is_copy[r] for s, r in zip(kept, rows, strict=True))]),
            sum(s.num_span_tokens for s in streams),
        )

    @property
    def num_tokens(self) -> int:
        return 0 if self.batch is None else self.batch.num_tokens

    def to(self, device: torch.device | str) -> NoisyBatch:
        return replace(
            self,
            batch=None if self.batch is None else self.batch.to(device),
            weights=self.weights.to(device),
            is_copy=self.is_copy.to(device),
        )


@dataclass(frozen=True, eq=False)
class Planned:
    """The objective. A group of a pack is the number of an example's turn: turns `n`, `n + N`,
    `n + 2N` … are of example `n` of `N`, in one epoch after the other (`renewed.Turns`).

    Noise and lengths of a turn are a function of `seed` and the turn: neither packing, nor a
    resumed run, nor the number of processes changes them. `mask` and `shifted` as in `with_copies`.

    Metrics: `loss_plan`, the mean over main's targets; `loss_spans`, the mean over tokens of
    blocks of what masked ones weigh; `loss_masked`, the mean over masked ones; and the mean loss
    of each class of main's targets.
    """

    examples: Renewed
    mask: int
    shifted: bool
    weights: LossWeights = LossWeights()
    seed: int = 0

    def batch(self, pack: Pack) -> NoisyBatch:
        return NoisyBatch.of([self.streams(turn) for turn in pack])

    def streams(self, turn: int) -> Streams:
        """What is computed of an example in a turn."""
        generator = generator_of(self.seed, turn)
        example = self.examples.of_turn(turn, generator)
        if not self.weights.spans:
            return pruned(clean_alone(example))
        noise = draw_noise(example, generator)
        return self.streams_of(example, noise)

    def streams_of(self, example: Example, noise: Noise) -> Streams:
        """What is computed of an example under a given noise."""
        own = example if self.weights.plan else without_main(example)
        return pruned(with_copies(own, noise, mask=self.mask, shifted=self.shifted))

    def outcome(self, model: Any, batch: NoisyBatch) -> Outcome:
        if batch.batch is None:
            zero = next(p for p in model.parameters() if p.requires_grad).sum() * 0
            return Outcome(zero, float(batch.num_span_tokens))
        losses = -token_logprobs(model, batch.batch)
        plan, masked = losses[~batch.is_copy], losses[batch.is_copy]
        spans = (masked * batch.weights).sum()
        num_span_tokens = batch.num_span_tokens if self.weights.spans else 0
        metrics = {
            "loss_plan": _share(plan.sum(), len(plan)),
            "loss_spans": _share(spans, num_span_tokens),
            "loss_masked": _share(masked.sum(), len(masked)),
            **_by_class(plan, batch.batch.classes[~batch.is_copy]),
        }
        told = {name: share for name, share in metrics.items() if share[1]}
        loss = self.weights.plan * plan.sum() + self.weights.spans * spans
        return Outcome(loss, float(len(plan) + num_span_tokens), told)


def clean_alone(example: Example) -> Streams:
    """One stream: no copies, so that nothing of blocks is predicted."""
    length = len(example)
    return Streams(example, torch.zeros(length), torch.zeros(length, dtype=torch.bool), 0)


# -- internals -------------------------------------------------------------------------------------


def _share(total: Tensor, count: int) -> Share:
    return float(total.detach()), float(count)


def _by_class(losses: Tensor, classes: Tensor) -> Mapping[str, Share]:
    found = {}
    for number in sorted(set(classes.tolist())):
        own = losses[classes == number]
        found[f"loss_{CLASSES[number]}"] = _share(own.sum(), len(own))
    return found
