"""From scored answers to pairs: of each prompt's candidates the best and the worst.

`Scored` rows hold no lambda, so one scoring serves every lambda and variant. `Pair` rows hold every
decision with its numbers, those to leave a prompt out included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from stretto.data.rows import Row
from stretto.errors import InvalidInput
from stretto.train.scores import UNUSABLE, Speed, score, show_lambda

Skip = Literal["tie", "one-candidate", "no-sound-best", "best-is-worst", "lengths-differ"]
SKIPS: tuple[Skip, ...] = get_args(Skip)
TIE = 1e-9
"""Scores closer than this are the same: they differ by rounding alone."""


class Scored(Row):
    """A sampled answer with all that its score follows from.

    `branches`, `redundant`: children, and those that repeat an earlier sibling. `flaws`: what keeps
    it from being a good example. `quality`: null if the judge gave none or there was none to ask.
    `judge`: its identity. `measure`: what the judge measured, any JSON.
    """

    kind: ClassVar[str] = "scored"
    prompt_id: str
    sample: int
    baseline_tokens: int
    text_tokens: int
    control_tokens: int
    steps: int
    branches: int = 0
    redundant: int = 0
    flaws: list[str] = Field(default_factory=list)
    quality: float | None = None
    judge: str | None = None
    measure: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.prompt_id}/{self.sample}"

    @property
    def speed(self) -> Speed:
        return Speed(self.baseline_tokens, self.text_tokens, self.steps)


class Pair(Row):
    """The decision about one prompt: its best and worst sample, or why there is no pair.

    `scores`: of each sample number, as text, its score; null for one that is no candidate. `flaws`:
    those of the samples that have any. `lam`: lambda, "inf" included. `length_ratio`: the longer
    text was at most so many times the other's tokens; null where lengths did not matter.
    """

    kind: ClassVar[str] = "pair"
    prompt_id: str
    best: int | None = None
    worst: int | None = None
    skipped: Skip | None = None
    scores: dict[str, float | None]
    flaws: dict[str, list[str]] = Field(default_factory=dict)
    variant: str
    lam: str
    length_ratio: float | None = None
    judge: str | None = None

    @property
    def key(self) -> str:
        return self.prompt_id

    @property
    def num_candidates(self) -> int:
        """Candidates that had a score."""
        return sum(value is not None for value in self.scores.values())


def make_pair(
    rows: Sequence[Scored], *, lam: float, variant: str = "speedup",
    length_ratio: float | None = None,
) -> Pair:  # fmt: skip
    """The pair of one prompt's candidates.

    The best is the candidate with the highest score of those without flaws. The worst is the one
    with the lowest score, and it may be cut short, at a cap or by the budget; one that has no
    log-prob (`scores.UNUSABLE`) or no score is no candidate. No pair: fewer than two candidates
    ("one-candidate"); all scores the same ("tie"); every candidate flawed ("no-sound-best"); the
    best sound one scores no higher than the worst ("best-is-worst"). Equal scores are decided for
    the lower sample number.

    `length_ratio`, if any: of the candidates two whose texts differ in length by no more than this
    factor, with the widest gap between their scores; "lengths-differ" where no such two differ in
    score. It keeps out of what is learnt how long the best answers are. Raises `InvalidInput` for
    one below 1.
    """
    check_length_ratio(length_ratio)
    scores = {row.sample: _score(row, lam, variant) for row in rows}
    if len(scores) < len(rows):
        raise InvalidInput(f"prompt {rows[0].prompt_id} has one sample twice; score it again")
    best, worst, skipped = _choose(rows, scores, length_ratio)
    judges = {row.judge for row in rows if row.judge is not None}
    if lam != 0 and len(judges) > 1:
        raise InvalidInput(
            f"prompt {rows[0].prompt_id} was scored by different judges: "
            f"{' and '.join(sorted(judges))}; score it again"
        )
    return Pair(
        prompt_id=rows[0].prompt_id,
        best=None if skipped else best,
        worst=None if skipped else worst,
        skipped=skipped,
        scores={str(sample): value for sample, value in sorted(scores.items())},
        flaws={str(row.sample): row.flaws for row in rows if row.flaws},
        variant=variant,
        lam=show_lambda(lam),
        length_ratio=length_ratio,
        judge=next(iter(judges), None) if lam != 0 else None,
    )


def check_length_ratio(ratio: float | None) -> None:
    """Raises `InvalidInput` for one below 1."""
    if ratio is not None and not ratio >= 1:
        raise InvalidInput(f"the length ratio must be at least 1, got {ratio:g}")


def _score(row: Scored, lam: float, variant: str) -> float | None:
    if UNUSABLE & set(row.flaws):
        return None
    return score(row.speed.by(variant), row.quality, lam)


def _choose(
    rows: Sequence[Scored], scores: dict[int, float | None], length_ratio: float | None
) -> tuple[int | None, int | None, Skip | None]:
    known = {sample: value for sample, value in sorted(scores.items()) if value is not None}
    if any(math.isnan(value) for value in known.values()):
        raise InvalidInput(f"prompt {rows[0].prompt_id} has a score that is no number")
    if len(known) < 2:
        return None, None, "one-candidate"
    if max(known.values()) - min(known.values()) <= TIE:
        return None, None, "tie"
    sound = {row.sample for row in rows if not row.flaws}
    candidates = [sample for sample in known if sample in sound]
    if not candidates:
        return None, None, "no-sound-best"
    lengths = {row.sample: max(1, row.text_tokens) for row in rows}
    most = math.inf if length_ratio is None else length_ratio
    alike = [
        (best, worst)
        for best in candidates
        for worst in known
        if max(lengths[best], lengths[worst]) <= most * min(lengths[best], lengths[worst])
    ]
    best, worst = max(alike, key=lambda pair: known[pair[0]] - known[pair[1]])
    if known[best] - known[worst] <= TIE:
        return None, None, "best-is-worst" if length_ratio is None else "lengths-differ"
    return best, worst, None


def make_pairs(
    rows: Iterable[Scored], *, lam: float, variant: str = "speedup",
    length_ratio: float | None = None,
) -> list[Pair]:  # fmt: skip
    """`make_pair` of every prompt, in the order in which prompts first come."""
    groups: dict[str, list[Scored]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(row)
    return [
        make_pair(group, lam=lam, variant=variant, length_ratio=length_ratio)
        for group in groups.values()
    ]


def summarise(pairs: Sequence[Pair], rows: Sequence[Scored]) -> dict[str, Any]:
    """Counts of a pairing: pairs, skips by reason, how often a flawed answer was the worst, and
    what best and worst have on average."""
    known = {(row.prompt_id, row.sample): row for row in rows}
    skips = Counter(p.skipped for p in pairs if p.skipped)
    made = [p for p in pairs if p.best is not None and p.worst is not None]
    sides = {
        side: [known[p.prompt_id, number] for p in made for number in [getattr(p, side)]]
        for side in ("best", "worst")
    }
    return {
        "prompts": len(pairs),
        "pairs": len(made),
        "skipped": {reason: skips[reason] for reason in SKIPS if skips[reason]},
        "flawed_worst": sum(bool(row.flaws) for row in sides["worst"]),
        **{side: _averages(found) for side, found in sides.items()},
    }


def _averages(rows: Sequence[Scored]) -> dict[str, float | None]:
    count = len(rows)
    qualities = [row.quality for row in rows if row.quality is not None]
    return {
        "speedup": sum(r.speed.speedup for r in rows) / count if count else None,
        "parallelism": sum(r.speed.parallelism for r in rows) / count if count else None,
        "quality": sum(qualities) / len(qualities) if qualities else None,
        "redundant": sum(r.redundant for r in rows) / count if count else None,
        "steps": sum(r.steps for r in rows) / count if count else None,
        "text_tokens": sum(r.text_tokens for r in rows) / count if count else None,
    }
