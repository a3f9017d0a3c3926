"""From figures of answers to figures of prompts, where a prompt has several answers.

Intervals are over prompts, and all samples of a prompt are drawn together: they are not independent
of one another. So all that is resampled is a number a prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

RATIOS = (
    "realized", "end_to_end", "theoretical", "efficiency", "parallelism", "realized_ended",
    "theoretical_ended", "realized_baseline_ended", "theoretical_baseline_ended", "matched",
)  # fmt: skip


def by_prompt(
    figures: Sequence[Mapping[str, Any]], *, has_votes: bool = False
) -> list[dict[str, Any]]:
    """Figures of `metrics.figures_of`, one a prompt in order: of each ratio the geometric mean over
    its answers that have it, of each other number the mean; of what is no number the first.

    `majority` and `baseline_majority` are added: None for one answer, or a task without votes.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in figures:
        groups.setdefault(row["prompt_id"], []).append(row)
    return [_merged(group) | _majorities(group, has_votes) for group in groups.values()]


def majority(votes: Sequence[tuple[str | None, float | None]]) -> float:
    """The score of the answer that most samples of a prompt give. `votes`: of each sample what it
    says, None if nothing, and its score. Of a tie the mean: what a draw among the tied comes to. 0
    if nobody says anything."""
    counts = Counter(vote for vote, _ in votes if vote is not None)
    most = max(counts.values(), default=0)
    scores = {vote: score or 0.0 for vote, score in reversed(votes) if vote is not None}
    tied = [scores[vote] for vote, count in counts.items() if count == most]
    return sum(tied) / len(tied) if tied else 0.0


def _merged(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(group) == 1:
        return dict(group[0])
    return {name: _mean(name, [row[name] for row in group]) for name in group[0]}


def _majorities(group: Sequence[Mapping[str, Any]], has_votes: bool) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for prefix in ("", "baseline_"):
        votes = [(row[f"{prefix}vote"], row[f"{prefix}score"]) for row in group]
        is_there = has_votes and len(group) > 1 and any(score is not None for _, score in votes)
        found[f"{prefix}majority"] = majority(votes) if is_there else None
    return found


def _mean(name: str, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not all(isinstance(value, int | float) for value in known):
        return known[0] if known else None
    if not known:
        return None
    if name in RATIOS:
        return math.exp(math.fsum(map(math.log, known)) / len(known))
    return math.fsum(known) / len(known)
