"""Which prompts of a file are used: by a field, by a range of hashes, by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from stretto.data.rows import Source
from stretto.errors import InvalidInput

HASHES = 1 << 64
"""Prompt ids are hexadecimal numbers below this."""


@dataclass(frozen=True)
class Split:
    """The prompts whose hash lies from `low` to `high` percent of all hashes, `high` excluded.

    Disjoint splits hold disjoint prompts whatever files they come from, in any order.
    """

    low: float = 0.0
    high: float = 100.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From LOW-HIGH, such as 0-90. Raises `InvalidInput`."""
        low, dash, high = text.partition("-")
        try:
            split = cls(float(low), float(high))
        except ValueError:
            split = cls(1, 0)
        if not dash or not 0 <= split.low < split.high <= 100:
            raise InvalidInput(
                f"split {text!r} is no range of percents; give LOW-HIGH, such as 0-90"
            )
        return split

    def holds(self, prompt_id: str) -> bool:
        share = 100 * int(prompt_id, 16) / HASHES
        return self.low <= share < self.high


@dataclass(frozen=True)
class Selection:
    """What `select` keeps: prompts in `split` whose line has nothing in any field of `skip_if`
    (absent, null, false, 0 or empty), and of those the `limit` whose hashes are lowest, so that a
    larger limit keeps all that a smaller one did."""

    split: Split = Split()
    skip_if: tuple[str, ...] = ()
    limit: int | None = None


def select(
    sources: Sequence[Source], selection: Selection, fits: Callable[[str], bool] | None = None
) -> tuple[list[Source], dict[str, int]]:
    """The sources to use, in order, and how many lines were left out for which reason.

    `fits` says whether a prompt may be used at all; it is asked only about prompts that would be.
    A prompt counts once for `limit`, and but for `skip_if` all its lines stay or go together.
    """
    left_out = {f"field {field}": 0 for field in selection.skip_if}
    inside = []
    for source in sources:
        field = next((f for f in selection.skip_if if source.fields.get(f)), None)
        reason = "split" if field is None else f"field {field}"
        if field is None and selection.split.holds(source.prompt_id):
            inside.append(source)
        else:
            left_out[reason] = left_out.get(reason, 0) + 1
    prompts = {source.prompt_id: source.prompt for source in inside}
    reasons: dict[str, str] = {}
    num_chosen = 0
    for name in sorted(prompts):
        if selection.limit is not None and num_chosen >= selection.limit:
            reasons[name] = "limit"
        elif fits is not None and not fits(prompts[name]):
            reasons[name] = "length"
        else:
            num_chosen += 1
    for source in inside:
        if reason := reasons.get(source.prompt_id, ""):
            left_out[reason] = left_out.get(reason, 0) + 1
    kept = [source for source in inside if source.prompt_id not in reasons]
    return kept, {reason: count for reason, count in left_out.items() if count}
