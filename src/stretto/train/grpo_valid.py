"""Validation of a policy: greedy answers to problems that it is never trained on, and the choice of
the best step by nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stretto.errors import StrettoError
from stretto.train.grpo_advantages import RewardSettings, kv_of
from stretto.train.grpo_rollouts import Roller
from stretto.train.grpo_steps import GrpoSteps
from stretto.train.objective import Outcome, Validation
from stretto.train.packing import Pack


@dataclass(frozen=True)
class Problem:
    """Stands for a batch: what is asked is known, and nothing goes to a device."""

    def to(self, device: torch.device | str) -> Problem:
        return self


@dataclass(frozen=True)
class GreedyAnswers:
    """An objective whose outcome is that of greedy answers; its loss is minus the accuracy.

    Raises `StrettoError` where no problem can be answered at all: there is nothing to choose by.
    """

    roller: Roller
    steps: GrpoSteps
    rewards: RewardSettings

    def batch(self, pack: Pack) -> Problem:
        return Problem()

    def outcome(self, model: Any, batch: Problem) -> Outcome:
        items = self.roller.problems.items
        drawn = self.roller.draw(self.steps.num_updates_done, items, 1, temperature=0.0)
        rows = [row for group in drawn.groups for row in group]
        if not rows:
            raise StrettoError(
                "no problem of the validation could be answered; the run's rejects.jsonl says why"
            )
        right = [row for row in rows if row.figures.is_right]
        # Each problem is a group of its own, so "cost" holds an answer to its own length.
        kv = [k for row in right for k in kv_of([row.figures], self.rewards)]
        count, weight = len(items), float(len(rows))
        metrics = {
            "accuracy": (math.fsum(r.score for r in rows), float(count)),
            "live": (math.fsum(r.live_mean for r in rows), weight),
            "live_peak": (math.fsum(r.live_peak for r in rows), weight),
            "length": (math.fsum(len(r.ids) for r in rows), weight),
            "truncated": (math.fsum(r.is_cut for r in rows), weight),
            "kv": (math.fsum(kv), float(len(kv))),
        }
        loss = torch.tensor(-metrics["accuracy"][0])
        return Outcome(loss, float(count), metrics)


def greedy_validation(roller: Roller, steps: GrpoSteps, rewards: RewardSettings) -> Validation:
    """All problems of `roller` as one pack. A problem that cannot be answered counts as wrong."""
    return Validation(GreedyAnswers(roller, steps, rewards), [(0,)])


def best_step(lines: Iterable[Mapping[str, Any]], *, tolerance: float, by_kv: bool) -> int | None:
    """The best step by the validation lines of a run's metrics, in their order; None without any.

    Without `by_kv` the first one with the highest accuracy. With it, a step is best if its accuracy
    is within `tolerance` of the highest so far, and it held less KV than the best before, or that
    one is no longer within.
    """
    best: Mapping[str, Any] | None = None
    highest = -math.inf
    for line in lines:
        if line["kind"] != "valid":
            continue
        highest = max(highest, line["accuracy"])
        if best is None or _is_better(line, best, highest - tolerance, by_kv=by_kv):
            best = line
    return None if best is None else int(best["step"])


def _is_better(
    line: Mapping[str, Any], best: Mapping[str, Any], least: float, *, by_kv: bool
) -> bool:
    if not by_kv:
        return bool(line["accuracy"] > best["accuracy"])
    if line["accuracy"] < least:
        return False
    return bool(best["accuracy"] < least or line["live"] < best["live"])
