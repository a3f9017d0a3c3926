"""One response under way in annotator `likelihood`: what was read of it, what its plan loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.data.likelihood_loss import NOTHING, Loss, loss_of
from stretto.data.likelihood_plan import Plan
from stretto.data.likelihood_scorer import LogProbs
from stretto.data.likelihood_views import Part, Prepared

NO_PLAN = Plan((), 0, ())


@dataclass
class Work:
    """`full`: each unit's log-probs with all before it in view, None where nothing is. `blind` and
    `pair`: losses by unit as in `Costs`, raised by what was read of plans that were given up.
    `is_settled`: the plan itself was read, and `planned` is what units lose under it."""

    response: str
    prepared: Prepared
    topics: list[str] = field(default_factory=list)
    full: list[LogProbs | None] = field(init=False)
    blind: list[Loss] = field(init=False)
    pair: list[Loss] = field(init=False)
    planned: dict[int, Loss] = field(default_factory=dict)
    plan: Plan = NO_PLAN
    is_measured: bool = False
    is_settled: bool = False
    num_revisions: int = 0

    def __post_init__(self) -> None:
        self.full = [None] * self.size
        self.blind = [NOTHING] * self.size
        self.pair = [NOTHING] * self.size

    @property
    def parts(self) -> list[Part]:
        return self.prepared.parts

    @property
    def size(self) -> int:
        return len(self.parts)

    def text(self, index: int) -> str:
        """A unit's."""
        unit = self.parts[index].unit
        return self.response[unit.start : unit.end]

    def loss(self, index: int, blind: LogProbs | None) -> Loss:
        """What a unit loses that reads like this where something is hidden from it."""
        full = self.full[index]
        if full is None or blind is None:
            return NOTHING
        return loss_of(self.parts[index], self.parts[:index], full, blind)

    def is_doubtful(self) -> bool:
        """Whether the plan hides more than was measured: all of a unit that stood in the outline,
        or the topics of units that share a chunk with the one before."""
        moves = zip(self.parts, self.plan.moves, strict=True)
        return not self.is_settled and any(
            move.place == "continue" or (move.place == "start" and not part.is_hidden)
            for part, move in moves
        )

    def revise(self, read: Mapping[int, Loss], max_loss: float) -> None:
        """Takes what the plan's own view says of the units in it."""
        self.is_settled = all(loss.rate <= max_loss for loss in read.values())
        self.num_revisions += not self.is_settled
        self.planned = dict(read) if self.is_settled else {}
        for index, loss in read.items():
            if loss.rate > max_loss:
                self.blind[index] = self.pair[index] = loss

    def losses(self) -> list[float]:
        """What each unit loses under the plan: as read, else as the plan was made with."""
        return [
            self.planned[i].rate if i in self.planned else loss
            for i, loss in enumerate(self.plan.losses)
        ]

    def units(self) -> list[dict[str, Any]]:
        """What was measured and decided, unit by unit; nats rounded to a thousandth."""
        found = []
        for index, (move, lost) in enumerate(zip(self.plan.moves, self.losses(), strict=True)):
            blind = self.blind[index]
            found.append(
                {
                    "kind": self.parts[index].unit.kind,
                    "tokens": len(self.parts[index].ids),
                    "topic": self.topics[index],
                    "gain": round(blind.gain, 3),
                    "counted": blind.num_counted,
                    "loss": round(blind.rate, 4),
                    "pair_loss": round(self.pair[index].rate, 4),
                    "plan_loss": round(lost, 4),
                    "place": move.place,
                    "sync": move.sync,
                }
            )
        return found
