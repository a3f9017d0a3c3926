"""What answers kept in view: figures of an answer's row, and of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.eval.rows import Answered
from stretto.eval.statistics import NOTHING, Estimate, estimate_mean

LIVE = (
    "live", "live_peak", "live_generated", "live_generated_peak", "live_dense", "live_share",
    "live_slots", "live_generated_slots", "reserved", "reserved_peak",
)  # fmt: skip

DEFINITIONS = {
    "live": "tokens visible to a token of the answer, itself and the prompt's included; mean over "
    "the answer's tokens",
    "live_peak": "the most that one of its tokens sees",
    "live_generated": "as live, without the prompt's tokens",
    "live_generated_peak": "as live_peak, without the prompt's tokens",
    "live_dense": "what live_generated would be for an answer of the same length with nothing "
    "hidden: (tokens + 1) / 2",
    "live_share": "live_generated / live_dense of each answer",
    "live_slots": "slots of the pages that hold the tokens of live; every segment starts on a page "
    "of its own",
    "live_generated_slots": "the same without the prompt's pages",
    "reserved": "slots of the pages that an answer held, full or not, the prompt's included; mean "
    "over its passes, those of its prompt included",
    "reserved_peak": "slots of the most pages that an answer held at once, the prompt's included",
    "live_weighted": "sum of live_generated over all tokens of all answers, by their number: long "
    "answers count for more",
}


def live_figures(answer: Answered | None) -> dict[str, float | int | None]:
    """Of each of `LIVE` the figure; None for an answer that failed, is empty, or does not tell."""
    live = None if answer is None else answer.live
    if live is None or not live.dense_generated_mean:
        return dict.fromkeys(LIVE)
    return {
        "live": live.mean,
        "live_peak": live.peak,
        "live_generated": live.generated_mean,
        "live_generated_peak": live.generated_peak,
        "live_dense": live.dense_generated_mean,
        "live_share": live.generated_mean / live.dense_generated_mean,
        "live_slots": live.slots_mean,
        "live_generated_slots": live.generated_slots_mean,
        "reserved": live.reserved_mean,
        "reserved_peak": live.reserved_peak,
    }


def live_means(prompts: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Estimate]:
    """Of each figure the mean over prompts, with its interval; empty where no answer has it."""
    values = {name: [float(p[name]) for p in prompts if p[name] is not None] for name in LIVE}
    return {name: estimate_mean(v, seed) if v else NOTHING for name, v in values.items()}


def live_weighted(answers: Sequence[Answered]) -> float | None:
    """The mean of live generated tokens over all tokens of all answers; None without any."""
    rows = [a.live for a in answers if a.live is not None and a.live.dense_generated_mean]
    sizes = [2 * row.dense_generated_mean - 1 for row in rows]
    if not rows:
        return None
    total = math.fsum(row.generated_mean * n for row, n in zip(rows, sizes, strict=True))
    return total / math.fsum(sizes)
