"""What a training loop minimises: an objective makes batches of packs, and terms of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from stretto.train.packing import Pack

Share = tuple[float, float]
"""A metric of one batch: (sum, weight). Over several batches sums and weights add up, and what is
reported is sum / weight."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A batch's loss, summed over its terms and with a gradient, and how many terms that are.

    A step's loss is the sum over all its batches, on all processes, divided by all their terms:
    so it does not depend on how they are packed or shared out. `metrics` are for people.
    """

    loss: Tensor
    num_terms: float
    metrics: Mapping[str, Share] = field(default_factory=dict)


class Objective(Protocol):
    """SFT, preference, policy gradients, denoising: each is one of these.

    Randomness, in `batch` or in `outcome`, is drawn from torch's default generator, which the loop
    seeds for each pack of each step, or is a function of the run's seed and the group: neither a
    resumed run nor another number of processes changes it.
    """

    def batch(self, pack: Pack) -> Any:
        """The batch of a pack of groups, on the CPU, with a method `to(device)`."""
        ...

    def outcome(self, model: Any, batch: Any) -> Outcome:
        """The loss and metrics of a batch under the model as it is."""
        ...


@dataclass(frozen=True)
class Validation:
    """Packs that are never trained on, and the objective whose outcome on them is reported."""

    objective: Objective
    packs: Sequence[Pack]


class Tally:
    """Sums of losses, terms, tokens and metrics over batches."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.num_terms = 0.0
        self.num_tokens = 0
        self.shares: dict[str, Share] = {}

    def add(self, outcome: Outcome) -> None:
        self.loss += float(outcome.loss.detach())
        self.num_terms += outcome.num_terms
        for name, (total, weight) in outcome.metrics.items():
            before = self.shares.get(name, (0.0, 0.0))
            self.shares[name] = before[0] + total, before[1] + weight

    def report(self) -> dict[str, float]:
        """The mean loss and metrics; one without weight is left out."""
        means = {name: total / weight for name, (total, weight) in self.shares.items() if weight}
        return {"loss": self.loss / self.num_terms, "num_terms": self.num_terms, **means}
