"""Figures of a run: of each prompt from its row, and of all prompts with intervals.

`DEFINITIONS` goes into every result folder. A failed prompt is never dropped: where the figure is
quality it counts as the worst there is, in a ratio, which it has not, it is counted as left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.eval.by_prompt import RATIOS
from stretto.eval.live import DEFINITIONS as LIVE_DEFINITIONS
from stretto.eval.live import live_figures
from stretto.eval.rows import Answered, EvalRow, Side
from stretto.eval.statistics import (
    NOTHING,
    Estimate,
    arithmetic_mean,
    estimate_geometric,
    estimate_mean,
    estimate_quotient,
)

DEFINITIONS = {
    "realized": "baseline's decode time / ours for the prompt: seconds from the first token to the "
    "end, one request at a time, same engine and process, each side warmed up on the first prompt "
    "of a process or on every one, as `warm` in config.json says, who goes first changing from "
    "prompt to prompt; median over pairs",
    "end_to_end": "the same of the time from submission to the end, the prompt's pass included",
    "theoretical": "tokens drawn in the baseline's answer / our sequential_steps",
    "efficiency": "realized / theoretical",
    "parallelism": "our completion_tokens / our sequential_steps",
    "realized_ended": "realized, of the prompts on which both sides ended by themselves: a "
    "baseline that repeats itself until it is cut makes a speed-up too high, one that is cut early "
    "too low",
    "theoretical_ended": "theoretical, of the same prompts",
    "realized_baseline_ended": "realized, of the prompts on which the baseline ended by itself, "
    "whatever ours did: leaves its loops out, and keeps ours",
    "theoretical_baseline_ended": "theoretical, of the same prompts",
    "matched": "tokens of the shorter answer / our sequential_steps: nothing is gained by saying "
    "less, nor by saying more",
    "geometric_mean": "of a ratio over prompts; 95% interval by the percentile bootstrap over "
    "prompts",
    "arithmetic_mean": "of the same ratios, for comparison alone",
    "left_out": "prompts without the figure: failed, or a time or count of 0",
    "accuracy": "mean score of the task, in percent; a failed prompt scores 0. Of several samples "
    "a prompt the pass rate: the mean over prompts of the mean over its samples",
    "majority": "mean over prompts of the score of the answer that most of its samples give, in "
    "percent; of a tie the mean of the tied, 0 where no sample says anything",
    "accuracy_ended": "mean score of the answers that ended by themselves, in percent: the sum of "
    "their scores over all prompts by their number; whole prompts are resampled",
    "truncated": "mean over prompts of the share of answers that ended for want of tokens or room, "
    "in percent; they are scored as they are",
    "win_rate": "mean preference of the judge for our answer over the baseline's, in percent; a "
    "prompt that we failed is lost, one that the judge gave no verdict on is left out",
    "lc_win_rate": "length-controlled win rate, in percent: the win rate that a logistic model of "
    "the preferences predicts for answers as long as the baseline's",
    "well_formed": "share of all prompts whose answer's annotations have no issue but a clamped "
    "position and whose forked threads all wrote their own end; null for a method without "
    "annotations",
    "two_at_once": "share of all prompts in whose answer at least two threads drew a token in one "
    "step",
    "cut": "share of all prompts whose answer ended for want of tokens or room",
    "baseline_cut": "the same of the baseline's answer, which makes speed-ups false; see "
    "realized_ended",
    "failed": "share of all prompts that ended in an error on our side",
    "redundant": "forked threads of which at least half of the distinct runs of three tokens also "
    "stand in one earlier thread of the answer, or that are empty; of all forked threads",
    "unjoined": "forked threads that main never read, of all forked threads",
    "repeats": "prompts decoded more than once whose decodes all gave one text",
    **LIVE_DEFINITIONS,
}


def figures_of(
    row: EvalRow, verdicts: Mapping[str, float | None] | None = None, *, has_scores: bool = False
) -> dict[str, Any]:
    """The figures of an answer, flat; None where there is none.

    `verdicts`: the judge's preferences by prompt id, in a run that was judged; a prompt that we
    failed and the baseline did not has preference 0. `has_scores`: the task scores answers itself;
    a side that failed has score 0.
    """
    ours, baseline = row.ours, row.baseline
    realized = _over_time(baseline, ours, "decode_s")
    theoretical = _over(_count(baseline, "drawn_tokens"), _count(ours, "sequential_steps"))
    base_ended = baseline is not None and baseline.finish_reason == "stop"
    both_ended = base_ended and ours is not None and ours.finish_reason == "stop"
    preference = None if verdicts is None else verdicts.get(row.prompt_id)
    if verdicts is not None and ours is None and baseline is not None:
        preference = 0.0
    return {
        "number": row.number,
        "prompt_id": row.prompt_id,
        "sample": row.sample,
        "finish_reason": ours.finish_reason if ours else "error",
        "baseline_finish_reason": baseline.finish_reason if baseline else None,
        "realized": realized,
        "end_to_end": _over_time(baseline, ours, "total_s"),
        "theoretical": theoretical,
        "efficiency": _over(realized, theoretical),
        "parallelism": _over(_count(ours, "completion_tokens"), _count(ours, "sequential_steps")),
        "realized_ended": realized if both_ended else None,
        "theoretical_ended": theoretical if both_ended else None,
        "realized_baseline_ended": realized if base_ended else None,
        "theoretical_baseline_ended": theoretical if base_ended else None,
        "matched": _matched(ours, baseline),
        "score": _score(row, "ours", has_scores),
        "baseline_score": _score(row, "baseline", has_scores),
        "vote": ours.vote if ours else None,
        "baseline_vote": baseline.vote if baseline else None,
        "preference": preference,
        **_endings(row, has_scores),
        "sequential_steps": _count(ours, "sequential_steps"),
        "completion_tokens": _count(ours, "completion_tokens"),
        "control_tokens": _count(ours, "control_tokens"),
        "baseline_tokens": _count(baseline, "drawn_tokens"),
        "chars": len(ours.text) if ours else None,
        "baseline_chars": len(baseline.text) if baseline else None,
        "forked": len(ours.threads) - 1 if ours else None,
        "most_at_once": _count(ours, "most_at_once"),
        "redundant": _count(ours, "redundant"),
        "unjoined": _count(ours, "unjoined"),
        "well_formed": ours.well_formed if ours else None,
        "repeats": ours.repeats if ours else None,
        **live_figures(ours),
        "baseline_live_generated": live_figures(baseline)["live_generated"],
        "error": "; ".join(f"{side}: {why}" for side, why in row.errors.items()) or None,
    }


def _endings(row: EvalRow, has_scores: bool) -> dict[str, float | None]:
    """How the answers ended: cut short, by themselves, and what those scored."""
    found: dict[str, float | None] = {}
    for prefix, answer in (("", row.ours), ("baseline_", row.baseline)):
        side: Side = "baseline" if prefix else "ours"
        is_there = answer is not None or side in row.errors
        ended = answer is not None and answer.finish_reason == "stop"
        cut = answer is not None and answer.finish_reason == "length"
        score = _score(row, side, has_scores)
        found |= {
            f"{prefix}truncated": float(cut) if is_there else None,
            f"{prefix}ended": float(ended) if is_there else None,
            f"{prefix}ended_score": None if score is None else score * ended,
        }
    return found


def means_of(figures: Sequence[Mapping[str, Any]], seed: int) -> dict[str, dict[str, Any]]:
    """Of each ratio: geometric mean with its interval, arithmetic mean, and how many prompts."""
    return {name: _mean(figures, name, seed) for name in RATIOS}


def accuracy(figures: Sequence[Mapping[str, Any]], key: str, seed: int) -> Estimate:
    """The mean of `score` or `baseline_score` in percent. Nothing for a task without scores."""
    return percent(estimate_mean(values_of(figures, key), seed))


def accuracy_ended(figures: Sequence[Mapping[str, Any]], prefix: str, seed: int) -> Estimate:
    """The mean score of answers that ended by themselves in percent, of figures by prompt."""
    known = [f for f in figures if f[f"{prefix}ended_score"] is not None]
    above, below = ([float(f[f"{prefix}{n}"]) for f in known] for n in ("ended_score", "ended"))
    return percent(estimate_quotient(above, below, seed))


def win_rate(figures: Sequence[Mapping[str, Any]], seed: int) -> Estimate:
    """The mean preference in percent."""
    return percent(estimate_mean(values_of(figures, "preference"), seed))


def shares_of(figures: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Shares of all answers, failed ones included."""
    size = len(figures)
    annotates = any(f["well_formed"] is not None for f in figures)
    counts = {
        "well_formed": sum(f["well_formed"] is True for f in figures) if annotates else None,
        "two_at_once": sum((f["most_at_once"] or 0) >= 2 for f in figures),
        "cut": sum(f["finish_reason"] == "length" for f in figures),
        "baseline_cut": sum(f["baseline_finish_reason"] == "length" for f in figures),
        "failed": sum(f["finish_reason"] == "error" for f in figures),
    }
    return {name: None if n is None or not size else n / size for name, n in counts.items()}


def counts_of(figures: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Totals over all answers. `failures` counts those where either side ended in an error."""
    return {
        "prompts": len({f["prompt_id"] for f in figures}),
        "answers": len(figures),
        "failures": sum(f["error"] is not None for f in figures),
        "forked": sum(f["forked"] or 0 for f in figures),
        "redundant": sum(f["redundant"] or 0 for f in figures),
        "unjoined": sum(f["unjoined"] or 0 for f in figures),
        "repeats": sum(f["repeats"] is True for f in figures),
    }


def values_of(figures: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(f[key]) for f in figures if f[key] is not None]


def percent(estimate: Estimate) -> Estimate:
    """100 times it."""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return NOTHING
    return Estimate(100 * estimate.value, 100 * estimate.low, 100 * estimate.high)


def _mean(figures: Sequence[Mapping[str, Any]], name: str, seed: int) -> dict[str, Any]:
    values = values_of(figures, name)
    estimate = estimate_geometric(values, seed)
    return {
        "prompts": len(values),
        "left_out": len(figures) - len(values),
        "geometric_mean": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "arithmetic_mean": arithmetic_mean(values) if values else None,
    }


def _count(answer: Answered | None, name: str) -> int | None:
    return None if answer is None else int(getattr(answer, name))


def _over(above: float | None, below: float | None) -> float | None:
    """A positive ratio, else None."""
    return above / below if above and below else None


def _matched(ours: Answered | None, baseline: Answered | None) -> float | None:
    if ours is None or baseline is None:
        return None
    return _over(min(ours.completion_tokens, baseline.drawn_tokens), ours.sequential_steps)


def _over_time(baseline: Answered | None, ours: Answered | None, name: str) -> float | None:
    """The median over pairs of the baseline's seconds by ours."""
    if baseline is None or ours is None:
        return None
    pairs = list(zip(getattr(baseline, name), getattr(ours, name), strict=True))
    if not pairs or any(a <= 0 or b <= 0 for a, b in pairs):
        return None
    return float(statistics.median(a / b for a, b in pairs))


def _score(row: EvalRow, side: Side, has_scores: bool) -> float | None:
    answer = row.ours if side == "ours" else row.baseline
    if answer is not None:
        return answer.score
    return 0.0 if has_scores and side in row.errors else None
