"""All figures of one run, and the files that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.bench.report import to_csv
from stretto.eval import metrics
from stretto.eval.folder import ENVIRONMENT, SUMMARY, Run, read_json, write_json
from stretto.eval.lcwr import Judged, lc_win_rate
from stretto.eval.statistics import NOTHING, Estimate
from stretto.files import write_atomically

Figures = Sequence[Mapping[str, Any]]
QUALITIES = ("accuracy", "win_rate", "lc_win_rate")


def figures(run: Run) -> list[dict[str, Any]]:
    """The figures of every prompt, in order."""
    verdicts = None if run.verdicts is None else run.verdicts.preferences
    return [metrics.figures_of(row, verdicts, has_scores=run.has_scores) for row in run.rows]


def judged(rows: Figures) -> Judged:
    """The verdicts of a run's figures, for length control. A prompt that we failed has no length;
    its difference counts as 0."""
    known = [row for row in rows if row["preference"] is not None]
    return Judged(
        {row["prompt_id"]: float(row["preference"]) for row in known},
        {
            row["prompt_id"]: 0 if row["chars"] is None else row["chars"] - row["baseline_chars"]
            for row in known
        },
    )


def qualities(
    run: Run, rows: Figures, difficulty: Mapping[str, float] | None = None
) -> dict[str, Estimate]:
    """`accuracy`, `win_rate` and `lc_win_rate` in percent, each empty where the run has none."""
    seed = int(run.config["sampling"]["seed"])
    has_verdicts = run.verdicts is not None
    return {
        "accuracy": metrics.accuracy(rows, "score", seed) if run.has_scores else NOTHING,
        "win_rate": metrics.win_rate(rows, seed),
        "lc_win_rate": lc_win_rate(judged(rows), seed, difficulty) if has_verdicts else NOTHING,
    }


def baseline_accuracy(run: Run, rows: Figures) -> Estimate:
    seed = int(run.config["sampling"]["seed"])
    return metrics.accuracy(rows, "baseline_score", seed) if run.has_scores else NOTHING


def summary_of(run: Run) -> dict[str, Any]:
    """What `summary.json` holds: counts, shares, quality and speed with intervals, definitions."""
    rows = figures(run)
    seed = int(run.config["sampling"]["seed"])
    quality = {name: e.to_json() for name, e in qualities(run, rows).items() if e.value is not None}
    if run.has_scores and run.has_baseline:
        quality["baseline_accuracy"] = baseline_accuracy(run, rows).to_json()
    return {
        "run": run.name,
        "counts": metrics.counts_of(rows) | _unjudged(run),
        "shares": metrics.shares_of(rows),
        "quality": quality,
        "judge": None if run.verdicts is None else run.verdicts.judge,
        "speed": metrics.means_of(rows, seed),
        "task_shares": _task_shares(run),
        "revisions": revisions(run),
        "definitions": metrics.DEFINITIONS,
    }


def revisions(run: Run) -> list[str | None]:
    """The revisions of the code that measured the run, each once: more than one, if it was gone on
    with after a change."""
    entries = read_json(run.path / ENVIRONMENT)
    return list(dict.fromkeys(entry["machine"]["revision"] for entry in entries))


def _unjudged(run: Run) -> dict[str, int]:
    """How many prompts the judge gave no verdict on, in a run that was judged."""
    if run.verdicts is None:
        return {}
    return {"unjudged": sum(value is None for value in run.verdicts.preferences.values())}


def save_summary(run: Run) -> dict[str, Any]:
    """Writes `prompts.csv`, `means.csv` and, last, `summary.json`, which is returned."""
    summary = summary_of(run)
    means = [{"figure": name} | mean for name, mean in summary["speed"].items()]
    for name, table in (("prompts", figures(run)), ("means", means)):
        write_atomically(run.path / f"{name}.csv", to_csv(table).encode())
    write_json(run.path / SUMMARY, summary)
    return summary


def text_of(summary: Mapping[str, Any]) -> str:
    """The summary for people: a table of speeds, then quality, shares and counts."""
    from stretto.bench.report import format_table

    means = [{"figure": name} | mean for name, mean in summary["speed"].items()]
    lines = [
        f"{name.replace('_', ' ')}: {e['value']:.1f} ({e['low']:.1f} to {e['high']:.1f})"
        for name, e in summary["quality"].items()
    ]
    lines += [f"{side}: {_listed(shares)}" for side, shares in summary["task_shares"].items()]
    lines += [f"shares: {_listed(summary['shares'])}", _listed(summary["counts"])]
    return "\n\n".join([format_table(means), "\n".join(lines)])


def _listed(values: Mapping[str, float | None]) -> str:
    known = {name: value for name, value in values.items() if value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in known.items())


def _task_shares(run: Run) -> dict[str, dict[str, float]]:
    """Of each side, the means of the task's shares over all prompts; a failed one has 0."""
    found: dict[str, dict[str, float]] = {}
    for side in ("ours", "baseline"):
        notes = [a.shares for row in run.rows if (a := getattr(row, side)) is not None]
        names = dict.fromkeys(name for note in notes for name in note)
        if names:
            found[side] = {n: sum(d.get(n, 0.0) for d in notes) / len(run.rows) for n in names}
    return found
