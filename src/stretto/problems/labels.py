"""Problems as training data: which register each step is written to, under which policy.

`liveness` lets go of a step after its last use, as early as registers allow (`data.registers`).
`round-robin` and `random` know nothing of the graph: null models, which let go of needed steps.
`none` writes no registers: what a dense model is trained on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal, get_args

from stretto.data.registers import (
    Assigned,
    at_random,
    liveness,
    max_live,
    mean_live,
    needed_kills,
    round_robin,
)
from stretto.data.spill import Fitted, Piece, fit
from stretto.errors import InvalidInput, UnknownName
from stretto.problems.base import Problem, register_tag

Policy = Literal["liveness", "round-robin", "random", "none"]
LABELS: tuple[Policy, ...] = get_args(Policy)
DEFAULT_REGISTERS = 8


@dataclass(frozen=True)
class Labels:
    """How steps are labelled. `slack`: of `liveness`, each step is taken to be alive for 0 to so
    many steps after its last use, at random. `seed`: of slack and `random`. Raises `InvalidInput`
    and `UnknownName`."""

    policy: Policy = "liveness"
    num_registers: int = DEFAULT_REGISTERS
    slack: int = 0
    grace: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in LABELS:
            raise UnknownName("labels", self.policy, list(LABELS))
        if self.num_registers < 1:
            raise InvalidInput(f"registers must be at least 1, got {self.num_registers}")
        if self.slack < 0:
            raise InvalidInput(f"slack must be at least 0, got {self.slack}")
        if self.slack and self.policy != "liveness":
            raise InvalidInput(f"labels {self.policy} know no slack; leave it at 0")

    @property
    def name(self) -> str:
        return self.policy if self.policy == "none" else f"{self.policy}-{self.num_registers}"


@dataclass(frozen=True)
class Labelled:
    """A solution with registers. `response`: without them; with facts that are said again it has
    more than the problem's own. `details`: what it took, and what it costs."""

    response: str
    annotated: str
    registers: tuple[int, ...]
    details: dict[str, Any]


def label(problem: Problem, labels: Labels) -> Labelled | None:
    """A problem's solution with registers, or None if its steps cannot be made to fit them.

    `details`: `registers`, one a step; `max_live`: registers needed without slack; `merged`,
    `restated`: how often steps were joined or facts said again to need no more; `needed_kills`:
    steps let go of too early; `hurried`: as in `Assigned`; `mean_live` and `dense_live`: generated
    tokens seen on average, with the registers and with nothing let go of.
    """
    if labels.policy == "none":
        plain = problem.response()
        return Labelled(plain, plain, (), {"max_live": max_live(problem.reads)})
    fitted = _fitted(problem, labels)
    if fitted is None:
        return None
    assigned = _assigned(problem, fitted, labels)
    texts = [_text(problem, piece) for piece in fitted.pieces]
    pairs = zip(assigned.registers, texts, strict=True)
    total = sum(fitted.lengths)
    details = {
        "registers": list(assigned.registers),
        "max_live": max_live(problem.reads, grace=labels.grace),
        "merged": fitted.merged,
        "restated": fitted.restated,
        "hurried": assigned.hurried,
        "needed_kills": len(needed_kills(assigned.registers, fitted.reads, grace=labels.grace)),
        "mean_live": mean_live(fitted.lengths, assigned.registers, grace=labels.grace),
        "dense_live": (total + 1) / 2,
    }
    annotated = "".join(register_tag(register) + text for register, text in pairs)
    return Labelled("".join(texts), annotated, assigned.registers, details)


def _fitted(problem: Problem, labels: Labels) -> Fitted | None:
    if labels.policy == "liveness":
        return fit(
            problem.lengths,
            problem.reads,
            labels.num_registers,
            grace=labels.grace,
            restate=lambda steps: 1 + len(_facts(problem, steps)),
        )
    pairs = enumerate(zip(problem.lengths, problem.reads, strict=True))
    return Fitted(tuple(Piece((k,), (), n, reads) for k, (n, reads) in pairs), 0, 0)


def _assigned(problem: Problem, fitted: Fitted, labels: Labels) -> Assigned:
    num_steps, number = len(fitted.pieces), labels.num_registers
    rng = random.Random(f"labels/{labels.policy}/{labels.seed}/{problem.id}")
    if labels.policy == "round-robin":
        return round_robin(num_steps, number)
    if labels.policy == "random":
        return at_random(num_steps, number, rng)
    slack = [rng.randint(0, labels.slack) for _ in range(num_steps)]
    found = liveness(fitted.lengths, fitted.reads, number, grace=labels.grace, slack=slack)
    if found is None:
        raise AssertionError(f"{problem.id} was made to fit {number} registers and does not")
    return found


def _text(problem: Problem, piece: Piece) -> str:
    return "".join(problem.steps[k].text for k in piece.steps) + _facts(problem, piece.restates)


def _facts(problem: Problem, steps: tuple[int, ...]) -> str:
    return "".join(problem.steps[k].fact for k in steps)
