"""Steps of a response as training data: which register each is written to, under which policy.

`liveness` lets go of a step after its last use, as early as registers allow (`data.registers`);
`stack` of some later, by a rule that the last steps tell.
`round-robin` and `random` know nothing of the graph: null models, which let go of needed steps.
`none` writes no registers: what a dense model is trained on.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stretto.data.registers import (
    Assigned,
    Reads,
    at_random,
    liveness,
    max_live,
    mean_live,
    needed_kills,
    round_robin,
    shifted,
    stack,
)
from stretto.data.spill import Fitted, fit, unchanged
from stretto.dialects.registers import DEFAULT_REGISTERS, MAX_REGISTERS, register_name
from stretto.errors import InvalidInput, UnknownName

Policy = Literal["liveness", "stack", "round-robin", "random", "none"]
LABELS: tuple[Policy, ...] = get_args(Policy)
FITTING: tuple[Policy, ...] = ("liveness", "stack")
"""Those that let go of nothing that is needed."""


def register_tag(register: int) -> str:
    """A register's text form."""
    return f"<{register_name(register)}>"


@dataclass(frozen=True)
class Labels:
    """How steps are labelled.

    `slack`: of `liveness`, each step is taken to be alive for 0 to so many steps after its last
    use, at random. `shifted`: in each row the registers' numbers begin at another one, drawn at
    random, so that where a step is stands in the text alone and cannot be counted up from the
    prompt. `seed`: of all that is drawn. Raises `InvalidInput` and `UnknownName`.
    """

    policy: str = "liveness"
    num_registers: int = DEFAULT_REGISTERS
    slack: int = 0
    grace: bool = False
    seed: int = 0
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.policy not in LABELS:
            raise UnknownName("labels", self.policy, list(LABELS))
        if not 1 <= self.num_registers <= MAX_REGISTERS:
            raise InvalidInput(
                f"registers must be from 1 to {MAX_REGISTERS}, got {self.num_registers}"
            )
        if self.slack < 0:
            raise InvalidInput(f"slack must be at least 0, got {self.slack}")
        if self.slack and self.policy != "liveness":
            raise InvalidInput(f"labels {self.policy} know no slack; leave it at 0")

    @property
    def name(self) -> str:
        """Of rows made so: all that decides the registers but the seed."""
        if self.policy == "none":
            return self.policy
        slack = f"-slack-{self.slack}" if self.slack else ""
        marks = f"{'-grace' if self.grace else ''}{'-shifted' if self.shifted else ''}"
        return f"{self.policy}-{self.num_registers}{slack}{marks}"


@dataclass(frozen=True)
class CutText:
    """A response cut into steps, and what they read. `before`: text before the first step, which
    is in no register. `facts`: of each step what a restatement says of it; None: unknown, so that
    nothing can be restated."""

    texts: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    before: str = ""
    facts: tuple[str, ...] | None = None

    @property
    def response(self) -> str:
        return self.before + "".join(self.texts)


@dataclass(frozen=True)
class Labelled:
    """A response with registers. `response`: without them; where facts are said again it is longer
    than the text that was given. `details`: what it took, and what it costs."""

    response: str
    annotated: str
    registers: tuple[int, ...]
    details: dict[str, Any]


def label(cut: CutText, labels: Labels, count: Callable[[str], int], name: str) -> Labelled | None:
    """A response with registers, or None if its steps cannot be made to fit them.

    `count` gives the tokens of a text; `name` is what slack and random registers are drawn for, so
    that they do not depend on other rows. `details`: `registers`, one a step; `max_live`: how many
    are needed, before any spill; `merged`, `restated`: how often steps were joined or facts said
    again to need no more; `needed_kills`: steps let go of too early; `hurried`: as in `Assigned`;
    `mean_live`, `dense_live`: generated tokens seen on average, with the registers and with nothing
    let go of.
    """
    lengths = [1 + count(text) for text in cut.texts]
    most = max_live(cut.reads, grace=labels.grace)
    if labels.policy == "none":
        return Labelled(cut.response, cut.response, (), {"max_live": most})
    fitted = _fitted(cut, lengths, labels, count)
    if fitted is None:
        return None
    assigned = _assigned(fitted.lengths, fitted.reads, labels, name)
    if labels.shifted:
        first = random.Random(f"labels/shifted/{labels.seed}/{name}").randrange(
            labels.num_registers
        )
        assigned = shifted(assigned, labels.num_registers, first)
    texts = [
        "".join([*(cut.texts[k] for k in piece.steps), *_facts(cut, piece.restates)])
        for piece in fitted.pieces
    ]
    before = count(cut.before)
    kept = {"grace": labels.grace}
    details = {
        "registers": list(assigned.registers),
        "max_live": most,
        "merged": fitted.merged,
        "restated": fitted.restated,
        "hurried": assigned.hurried,
        "needed_kills": len(needed_kills(assigned.registers, fitted.reads, **kept)),
        "mean_live": mean_live(fitted.lengths, assigned.registers, before=before, **kept),
        "dense_live": (before + sum(fitted.lengths) + 1) / 2,
    }
    tagged = (register_tag(r) + text for r, text in zip(assigned.registers, texts, strict=True))
    response, annotated = ("".join([cut.before, *parts]) for parts in (texts, tagged))
    return Labelled(response, annotated, assigned.registers, details)


def _fitted(
    cut: CutText, lengths: list[int], labels: Labels, count: Callable[[str], int]
) -> Fitted | None:
    if labels.policy not in FITTING:
        return unchanged(lengths, cut.reads)
    restate = None
    if cut.facts is not None:
        restate = lambda steps: 1 + count("".join(_facts(cut, steps)))  # noqa: E731
    return fit(lengths, cut.reads, labels.num_registers, grace=labels.grace, restate=restate)


def _facts(cut: CutText, steps: tuple[int, ...]) -> list[str]:
    return [] if cut.facts is None else [cut.facts[k] for k in steps]


def _assigned(lengths: tuple[int, ...], reads: Reads, labels: Labels, name: str) -> Assigned:
    number = labels.num_registers
    rng = random.Random(f"labels/{labels.policy}/{labels.seed}/{name}")
    if labels.policy == "round-robin":
        return round_robin(len(lengths), number)
    if labels.policy == "random":
        return at_random(len(lengths), number, rng)
    if labels.policy == "stack":
        found = stack(reads, number, grace=labels.grace)
    else:
        slack = [rng.randint(0, labels.slack) for _ in lengths]
        found = liveness(lengths, reads, number, grace=labels.grace, slack=slack)
    if found is None:
        raise AssertionError(f"{name} was made to fit {number} registers and does not")
    return found


# -- many rows -------------------------------------------------------------------------------------

AVERAGED = ("max_live", "mean_live", "dense_live")


@dataclass
class Tally:
    """What labelling some rows came to. `dropped`: rows without labels, by the code of the reason;
    `counts`: rows that needed mergers, restatements, a hurried kill, or that lost a needed step."""

    num_rows: int = 0
    num_repeated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("merged", "restated", "hurried", "needed_kills"), 0)
    )
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, details: dict[str, Any]) -> None:
        """A row that is labelled."""
        self.num_rows += 1
        for name in self.counts:
            self.counts[name] += bool(details.get(name))
        for name in AVERAGED:
            if name in details:
                self.figures.setdefault(name, []).append(details[name])

    def drop(self, reason: str) -> None:
        """A row that is not, for a reason as in `code: what and where`."""
        self.dropped[reason.partition(":")[0]] += 1

    def to_json(self) -> dict[str, Any]:
        """Counts, and means over the labelled rows, null where there are none."""
        means = {name: statistics.fmean(values) for name, values in self.figures.items()}
        return {
            "rows": self.num_rows,
            "repeated": self.num_repeated,
            "dropped": dict(sorted(self.dropped.items())),
            **self.counts,
            **{name: means.get(name) for name in AVERAGED},
        }
