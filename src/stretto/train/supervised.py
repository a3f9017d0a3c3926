"""Supervised fine-tuning: the negative log-likelihood of the targets of annotated responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stretto.errors import InvalidInput
from stretto.train.batches import Batch
from stretto.train.examples import Example
from stretto.train.logprobs import token_logprobs
from stretto.train.objective import Outcome
from stretto.train.packing import Pack
from stretto.train.targets import CLASSES


@dataclass(frozen=True)
class Supervised:
    """Cross-entropy under the sampler's masks, a term a target. A group is one example.

    Metrics: the mean loss of each class of targets. Raises `InvalidInput` for an example without
    a target: its loss would be 0, and nothing would show that it teaches nothing.
    """

    examples: Sequence[Example]

    def batch(self, pack: Pack) -> Batch:
        return Batch.of([self.examples[number] for number in pack])

    def outcome(self, model: Any, batch: Batch) -> Outcome:
        check_targets(batch)
        losses = -token_logprobs(model, batch)
        sums = torch.zeros(len(CLASSES), dtype=torch.float64, device=losses.device)
        sums.index_add_(0, batch.classes, losses.detach().double())
        counts = torch.bincount(batch.classes, minlength=len(CLASSES)).tolist()
        shares = zip(CLASSES, sums.tolist(), counts, strict=True)
        metrics = {f"loss_{name}": (total, float(n)) for name, total, n in shares if n}
        return Outcome(losses.sum(), float(batch.num_targets), metrics)


def check_targets(batch: Batch) -> None:
    """Raises `InvalidInput`, naming the row, if an example of the batch has no target."""
    counts = torch.bincount(batch.owner, minlength=batch.num_examples)
    if empty := (counts == 0).nonzero()[:, 0].tolist():
        raise InvalidInput(
            f"row {batch.keys[empty[0]]!r} has no token to learn from; leave it out of the data"
        )
