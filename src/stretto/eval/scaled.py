"""Win rates of runs that are compared: on one scale, and told apart by how the baseline ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.eval import metrics
from stretto.eval.folder import Run, Verdicts
from stretto.eval.judges.scale import Gap, Scale
from stretto.eval.statistics import NOTHING, Estimate, estimate_mean
from stretto.eval.summary import Figures, figures

LIKELIHOOD = "likelihood"
RATES = ("wins", "win_rate_no_brevity", "win_rate_baseline_ended", "win_rate_baseline_cut")

DEFINITIONS = {
    "win_rate": "as in a run's summary; but judge likelihood takes its length slope and its spread "
    "from the verdicts on all runs compared, and not from each run's alone, so that all are on one "
    "scale",
    "wins": "share of prompts on which the judge prefers our answer, by however little, in "
    "percent; a tie counts half",
    "win_rate_no_brevity": "of judge likelihood: the win rate if an answer did not pay for being "
    "shorter than the other",
    "win_rate_baseline_ended": "the win rate over the prompts on which the baseline ended by "
    "itself",
    "win_rate_baseline_cut": "the win rate over the prompts on which the baseline was cut short, "
    "most often in a loop",
}


def on_one_scale(runs: Sequence[Run], *, is_charged: bool = True) -> list[Run]:
    """The runs with preferences of judge `likelihood` on the scale of all their verdicts together.

    Verdicts of other judges, and those on answers that were not measured, stay as they are.
    `is_charged`: whether brevity counts.
    """
    found = {run.name: _gaps(run.verdicts) for run in runs}
    scale = Scale.of([gap for gaps in found.values() for gap in gaps.values()])
    return [_scaled(run, found[run.name], scale, is_charged) for run in runs]


def rates(run: Run, uncharged: Run, prompts: Figures, seed: int) -> dict[str, Estimate]:
    """`RATES` of a run by its figures by prompt, each empty where there is none. `uncharged`: the
    run as `on_one_scale` has it where brevity is not charged."""
    ends = {
        name: metrics.win_rate([f for f in prompts if f["baseline_finish_reason"] == end], seed)
        for name, end in (("win_rate_baseline_ended", "stop"), ("win_rate_baseline_cut", "length"))
    }
    has_brevity = run.verdicts is not None and run.verdicts.kind == LIKELIHOOD
    return {
        "wins": _wins(prompts, seed),
        "win_rate_no_brevity": metrics.win_rate(figures(uncharged), seed)
        if has_brevity
        else NOTHING,
        **ends,
    }


def _gaps(verdicts: Verdicts | None) -> dict[str, Gap]:
    """What was measured, by prompt, of the verdicts that hold it."""
    if verdicts is None or verdicts.kind != LIKELIHOOD:
        return {}
    gaps = {name: Gap.of(details) for name, details in verdicts.details.items()}
    return {name: gap for name, gap in gaps.items() if gap is not None}


def _scaled(run: Run, gaps: dict[str, Gap], scale: Scale, is_charged: bool) -> Run:
    if run.verdicts is None or not gaps:
        return run
    new = {
        name: (scale.preference(gap, is_charged=is_charged) + 1) / 2 for name, gap in gaps.items()
    }
    preferences = {**run.verdicts.preferences, **new}
    return replace(run, verdicts=replace(run.verdicts, preferences=preferences))


def _wins(prompts: Figures, seed: int) -> Estimate:
    values = metrics.values_of(prompts, "preference")
    won = [float(value > 0.5) if value != 0.5 else 0.5 for value in values]
    return metrics.percent(estimate_mean(won, seed))
