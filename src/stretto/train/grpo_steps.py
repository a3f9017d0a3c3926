"""The steps of GRPO for the loop: rollouts by the policy as it is, then updates on them.

One object says what is in a step and what is minimised, since what there is to train on is drawn
as the step begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto.eval.tasks import Item
from stretto.train.batches import Batch
from stretto.train.examples import ExampleMaker
from stretto.train.grpo import LossSettings, PolicyBatch, PolicyExample, policy_loss
from stretto.train.grpo_advantages import Advantage, RewardSettings, advantages, kv_of, rewards_of
from stretto.train.grpo_rollouts import Drawn, Roller, Rollout, old_logprobs
from stretto.train.logprobs import token_logprobs
from stretto.train.objective import Outcome
from stretto.train.packing import Pack, pack
from stretto.train.unusable import Unusable


@dataclass(frozen=True)
class StepSettings:
    """`num_steps` of `prompts` problems with `samples` rollouts each; on each step's rollouts
    `inner` times `minibatches` updates. Sequences are packed up to `pack_tokens`."""

    num_steps: int
    prompts: int = 16
    samples: int = 8
    inner: int = 1
    minibatches: int = 1
    pack_tokens: int = 8192
    seed: int = 0

    @property
    def updates(self) -> int:
        """Of one step: what the loop counts."""
        return self.inner * self.minibatches


class GrpoSteps:
    """Both `Steps` and `Objective` of a loop: a step of the loop is an update.

    The rollouts of a step are drawn, or read where they are, when the loop asks for the packs of
    its first update. An update's packs leave out rollouts from which nothing follows, and the loss
    is divided as if they were in.
    """

    def __init__(
        self, model: Any, maker: ExampleMaker, encode_prompt: Callable[[str], list[int]],
        *, roller: Roller, settings: StepSettings, rewards: RewardSettings, loss: LossSettings,
    ) -> None:  # fmt: skip
        self._model = model
        self._maker = maker
        self._encode_prompt = encode_prompt
        self._roller = roller
        self._settings = settings
        self._rewards = rewards
        self._loss = loss
        self._reference = Weights(model) if loss.beta else None
        self._open: OpenStep | None = None
        self._scale = 1.0
        self.num_updates_done = 0

    @property
    def num_steps(self) -> int:
        return self._settings.num_steps * self._settings.updates

    def packs(self, step: int) -> list[Pack]:
        self.num_updates_done = step
        number, update = divmod(step, self._settings.updates)
        if self._open is None or self._open.number != number:
            self._open = None  # frees the last one
            self._open = self._begin(number)
        self.num_updates_done = step + 1
        chosen, self._scale = self._open.update(update)
        rollouts = self._open.rollouts
        return pack(chosen, lambda r: len(rollouts[r]), self._settings.pack_tokens)

    def batch(self, pack: Pack) -> PolicyBatch:
        if self._open is None:
            raise AssertionError("the loop asks for packs before it asks for batches")
        return PolicyBatch.of([self._open.rollouts[number] for number in pack])

    def outcome(self, model: Any, batch: PolicyBatch) -> Outcome:
        if self._open is None:
            raise AssertionError("the loop asks for packs before it asks for outcomes")
        found = policy_loss(model, batch, self._loss)
        own = {name: (value, 1.0) for name, value in self._open.figures.items()}
        return Outcome(found.loss, found.num_terms * self._scale, {**own, **found.metrics})

    # -- a step's rollouts ---------------------------------------------------------------------

    def problems_of(self, number: int) -> list[Item]:
        """The problems of a step: all in turn, shuffled anew each time through; those left over at
        the end of it, which fill no step, have their turn another time."""
        items, want = self._roller.problems.items, self._settings.prompts
        epoch, place = divmod(number, max(1, len(items) // want))
        order = np.random.default_rng([self._settings.seed, epoch]).permutation(len(items))
        return [items[k] for k in order[place * want : (place + 1) * want].tolist()]

    def _begin(self, number: int) -> OpenStep:
        items = self.problems_of(number)
        drawn = self._roller.draw(number + 1, items, self._settings.samples)
        prompts = [item.prompt for item, group in zip(items, drawn.groups, strict=True) if group]
        groups = [group for group in drawn.groups if group]
        if not groups:
            raise StrettoError(
                f"step {number + 1} has no rollout: no problem could be answered; the run's "
                "rejects.jsonl says why"
            )
        found = advantages([[r.figures for r in g] for g in groups], self._rewards)
        rollouts, num_unusable = self._examples(prompts, groups, found)
        if not rollouts:
            raise StrettoError(
                f"step {number + 1} has no rollout to learn from: all {num_unusable} were cut off "
                "where nothing can be learnt; raise max_tokens"
            )
        figures = figures_of(drawn, groups, found, self._rewards)
        figures["unusable"] = num_unusable / sum(map(len, groups))
        rollouts = self._with_references(rollouts)
        return OpenStep(number, rollouts, figures, self._settings, self._loss)

    def _examples(
        self, prompts: Sequence[str], groups: Sequence[Sequence[Rollout]],
        found: Sequence[Sequence[Advantage]],
    ) -> tuple[list[PolicyExample], int]:  # fmt: skip
        made, num_unusable = [], 0
        for prompt, group, own in zip(prompts, groups, found, strict=True):
            ids = self._encode_prompt(prompt)
            for rollout, advantage in zip(group, own, strict=True):
                try:
                    example = self._maker.from_answer(ids, rollout)
                    old = old_logprobs(example, rollout)
                except Unusable:
                    num_unusable += 1
                    continue
                if example.num_targets:
                    made.append(PolicyExample(example, old, advantage))
                else:
                    num_unusable += 1
        return made, num_unusable

    @torch.no_grad()
    def _with_references(self, rollouts: list[PolicyExample]) -> list[PolicyExample]:
        if self._reference is None:
            return rollouts
        found: dict[int, Tensor] = {}
        limit = self._settings.pack_tokens
        with self._reference.in_force():
            for numbers in pack(range(len(rollouts)), lambda r: len(rollouts[r]), limit):
                batch = Batch.of([rollouts[n].example for n in numbers]).to(self._model.device)
                logprobs = token_logprobs(self._model, batch).cpu()
                for place, number in enumerate(numbers):
                    found[number] = logprobs[(batch.owner == place).cpu()]
        return [replace(r, reference=found[n]) for n, r in enumerate(rollouts)]


@dataclass(eq=False)
class OpenStep:
    """A step under way: its usable rollouts, and figures of all of them."""

    number: int
    rollouts: list[PolicyExample]
    figures: Mapping[str, float]
    settings: StepSettings
    loss: LossSettings

    def update(self, update: int) -> tuple[list[int], float]:
        """The rollouts of an update that teach something, and by how much all of its terms are
        more than theirs. The shortest one, if none does."""
        inner, part = divmod(update, self.settings.minibatches)
        rng = np.random.default_rng([self.settings.seed, self.number, inner])
        order = rng.permutation(len(self.rollouts))
        parts = np.array_split(order, min(self.settings.minibatches, len(order)))
        own = parts[part % len(parts)].tolist()
        kept = [n for n in own if self.loss.beta or not self.rollouts[n].advantage.is_nothing]
        kept = kept or [min(own, key=lambda n: len(self.rollouts[n]))]
        return kept, self._terms(own) / self._terms(kept)

    def _terms(self, numbers: Sequence[int]) -> float:
        if not self.loss.counts_tokens:
            return float(len(numbers))
        return float(sum(len(self.rollouts[n].old) for n in numbers))


def figures_of(
    drawn: Drawn, groups: Sequence[Sequence[Rollout]], found: Sequence[Sequence[Advantage]],
    settings: RewardSettings,
) -> dict[str, float]:  # fmt: skip
    """What a step's rollouts came to, on average: a line of metrics.

    `kv` is over right answers. `entropy`: minus the mean log-prob of what was drawn, which
    estimates it. `no_signal`: the share of groups whose advantages are all 0.
    """
    every = [rollout for group in groups for rollout in group]
    known = [(r, k) for g in groups for r, k in zip(g, _kv(g, settings), strict=True)]
    rewards = [s - p for g in groups for s, p in rewards_of([r.figures for r in g], settings)]
    logprobs = [v for r in every for v in r.logprobs or () if v is not None]
    right = [k for r, k in known if r.figures.is_right]
    figures = {
        "reward": _mean(rewards),
        "accuracy": _mean([r.score for r in every]),
        "live": _mean([r.live_mean for r in every]),
        "live_peak": _mean([r.live_peak for r in every]),
        "length": _mean([len(r.ids) for r in every]),
        "control": _mean([r.control_tokens for r in every]),
        "truncated": _mean([r.is_cut for r in every]),
        "no_signal": _mean([all(a.is_nothing for a in own) for own in found]),
        "entropy": -_mean(logprobs) if logprobs else 0.0,
    }
    if right:
        figures["kv"] = _mean(right)
    if drawn.num_tokens:
        figures |= {
            "sample_seconds": round(drawn.seconds, 4),
            "sample_tokens_per_s": round(drawn.num_tokens / drawn.seconds, 1),
        }
    return figures


def _kv(group: Sequence[Rollout], settings: RewardSettings) -> list[float]:
    return kv_of([r.figures for r in group], settings)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


class Weights:
    """A copy of a model's trained weights as they are now, to be put in force for a while."""

    def __init__(self, model: Any) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._parameters = trained
        self._kept = {name: p.detach().clone() for name, p in trained.items()}

    @contextmanager
    def in_force(self) -> Iterator[None]:
        own = {name: p.data for name, p in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._kept[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]
