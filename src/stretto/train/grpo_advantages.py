"""From figures of rollouts to advantages: correctness and KV, so that neither undoes the other.

Group scaling cancels a penalty's weight: where all answers of a group are right, rewards differ by
the penalty alone, and any weight of it is divided away. So the default normalises correctness and
KV apart and adds them by weight; KV is compared among right answers only. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from stretto.errors import InvalidInput

Form = Literal["separate", "r1", "r2", "r3"]
FORMS: tuple[Form, ...] = ("separate", "r1", "r2", "r3")
Scale = Literal["none", "group", "batch"]
SCALES: tuple[Scale, ...] = ("none", "group", "batch")

EPSILON = 1e-4
"""Added to a standard deviation, as in TRL's GRPO."""

LONGEST = 1.25
"""Times the usual length up to which an answer may count as having saved KV."""

NOTHING = 1e-9
"""An advantage below it comes of rounding."""


@dataclass(frozen=True)
class Figures:
    """What the reward of a rollout follows from.

    `score`: from 0 to 1; 0 for an answer that did not end by itself. `num_tokens`: response tokens,
    of which `num_text` are in the text. `live_mean`: the generated tokens that a response token
    sees, itself included, on average.
    """

    score: float
    num_tokens: int
    num_text: int
    live_mean: float

    @property
    def is_right(self) -> bool:
        return self.score >= 1


@dataclass(frozen=True)
class RewardSettings:
    """How rollouts are rewarded: `weight` is that of KV, 0 for correctness alone.

    With c the score and k the KV of `kv_of`, forms are, before advantages are taken:
    `separate`: c and, among right answers, -weight·k, normalised apart; `r1`: c - weight·c·max(0,
    k - free); `r2`: c·(1 - weight·k); `r3`: c - weight·(share of right answers)·k.

    `measure`: "cost", "same", or a number of tokens (see `kv_of`). `length`: the usual length of
    an answer's text that "cost" holds answers to; None for that of the group's right answers.
    Advantages are divided by nothing, by each group's standard deviation, or by that of the whole
    batch about the groups' means. Raises `InvalidInput` for what cancels or is out of range.
    """

    weight: float = 0.0
    form: Form = "separate"
    free: float = 0.0
    measure: str | int = "cost"
    length: int | None = None
    scale: Scale = "batch"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InvalidInput(f"reward is {self.form!r}; known: {', '.join(FORMS)}")
        if self.scale not in SCALES:
            raise InvalidInput(f"scale is {self.scale!r}; known: {', '.join(SCALES)}")
        for name, value in (("kv_weight", self.weight), ("kv_free", self.free)):
            if not 0 <= value < math.inf:
                raise InvalidInput(f"{name} is {value}; it must be a number from 0 on")
        if not (self.measure in ("cost", "same") or _is_count(self.measure)):
            raise InvalidInput(
                f"kv_measure is {self.measure!r}; it is cost, same, or a number of tokens"
            )
        if self.length is not None and self.length < 1:
            raise InvalidInput(f"kv_length is {self.length}; it must be at least 1")
        if self.weight and self.form != "separate" and self.scale == "group":
            raise InvalidInput(
                f"with reward {self.form} and scale group the weight of KV cancels where all "
                "answers are right; take scale batch or none, or reward separate"
            )


def _is_count(value: str | int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class Advantage:
    """A rollout's advantage in two parts, which are added: for its score, and for its KV."""

    score: float
    kv: float

    @property
    def is_nothing(self) -> bool:
        return not (self.score or self.kv)


# -- KV --------------------------------------------------------------------------------------------


def kv_of(group: Sequence[Figures], settings: RewardSettings) -> list[float]:
    """What each rollout of a group held, 1 being what dense decoding holds.

    "cost" is the sum of live generated tokens over all steps, by that of the same text written
    without annotations with nothing hidden: n (n + 1) / 2 for n tokens of text, n being no more
    than the usual length. So annotations cost and buy nothing by themselves, a shorter text is
    held to its own length, and what is beyond the usual length only costs; an answer over
    `LONGEST` times as long counts as having saved nothing. "same" is the mean of live tokens by
    that of dense decoding of as many tokens; a number N of tokens, the mean by N. Both can be had
    by length alone, and are for comparison.
    """
    if settings.measure == "same":
        return [f.live_mean / ((f.num_tokens + 1) / 2) for f in group]
    if isinstance(settings.measure, int):
        return [f.live_mean / settings.measure for f in group]
    lengths = [f.num_text for f in group if f.is_right] or [f.num_text for f in group]
    usual = median(lengths) if settings.length is None else settings.length
    return [_cost(f, usual) for f in group]


def _cost(figures: Figures, usual: float) -> float:
    held_to = max(1.0, min(figures.num_text, usual))
    cost = figures.live_mean * figures.num_tokens / (held_to * (held_to + 1) / 2)
    return max(cost, 1.0) if figures.num_text > LONGEST * usual else cost


# -- rewards and advantages ------------------------------------------------------------------------


def rewards_of(group: Sequence[Figures], settings: RewardSettings) -> list[tuple[float, float]]:
    """Each rollout's (score, what is taken off for KV). Of the form `separate` that is what it
    comes to before it is normalised."""
    share = math.fsum(f.is_right for f in group) / len(group)
    penalties = []
    for figures, kv in zip(group, kv_of(group, settings), strict=True):
        if settings.form == "r3":
            penalties.append(settings.weight * share * kv)
        elif settings.form == "r1":
            penalties.append(settings.weight * figures.score * max(0.0, kv - settings.free))
        elif settings.form == "r2":
            penalties.append(settings.weight * figures.score * kv)
        else:
            penalties.append(settings.weight * figures.is_right * kv)
    return [(f.score, p) for f, p in zip(group, penalties, strict=True)]


def advantages(
    groups: Sequence[Sequence[Figures]], settings: RewardSettings
) -> list[list[Advantage]]:
    """The advantages of each group's rollouts. With weight 0 those of GRPO.

    The first part is the score's deviation from its group's mean. The second is minus the
    penalty's: from the mean of the group's right answers for the form `separate`, else from that
    of all. Each is divided as `scale` says: apart, or for the other forms by the whole reward's
    deviation.
    """
    if settings.form == "separate":
        return _separate(groups, settings)
    parts = [rewards_of(group, settings) for group in groups]
    scores = [_deviations([score for score, _ in part]) for part in parts]
    penalties = [_deviations([penalty for _, penalty in part]) for part in parts]
    wholes = [
        [s - p for s, p in zip(*both, strict=True)] for both in zip(scores, penalties, strict=True)
    ]
    divisors = _divisors(wholes, settings.scale)
    return [
        [_advantage(s / divisor, -p / divisor) for s, p in zip(*both, strict=True)]
        for both, divisor in zip(zip(scores, penalties, strict=True), divisors, strict=True)
    ]


def _separate(
    groups: Sequence[Sequence[Figures]], settings: RewardSettings
) -> list[list[Advantage]]:
    scores = [_deviations([f.score for f in group]) for group in groups]
    known = [kv_of(group, settings) for group in groups]
    held = [
        _deviations([k for f, k in zip(group, kv, strict=True) if f.is_right])
        for group, kv in zip(groups, known, strict=True)
    ]
    by_score, by_kv = _divisors(scores, settings.scale), _divisors(held, settings.scale)
    found = []
    for number, group in enumerate(groups):
        left = iter(held[number])
        found.append(
            [
                _advantage(
                    score / by_score[number],
                    -settings.weight * next(left) / by_kv[number] if f.is_right else 0.0,
                )
                for f, score in zip(group, scores[number], strict=True)
            ]
        )
    return found


def _advantage(score: float, kv: float) -> Advantage:
    parts = (0.0 if abs(part) < NOTHING else part for part in (score, kv))
    return Advantage(*parts)


def _deviations(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _divisors(deviations: Sequence[Sequence[float]], scale: Scale) -> list[float]:
    """One a group, of what deviates from the groups' means."""
    if scale == "none":
        return [1.0] * len(deviations)
    if scale == "group":
        return [_std(own, len(own) - 1) + EPSILON for own in deviations]
    every = [value for own in deviations for value in own]
    return [_std(every, len(every)) + EPSILON] * len(deviations)


def _std(deviations: Iterable[float], count: int) -> float:
    return math.sqrt(math.fsum(d * d for d in deviations) / max(1, count))
