"""All figures of one run, and the files that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.bench.report import to_csv
from stretto.eval import metrics
from stretto.eval.by_prompt import by_prompt
from stretto.eval.folder import SUMMARY, Run, read_environment, write_json
from stretto.eval.lcwr import Judged, lc_win_rate
from stretto.eval.live import live_means, live_weighted
from stretto.eval.statistics import NOTHING, Estimate, estimate_mean
from stretto.files import write_atomically

Figures = Sequence[Mapping[str, Any]]
SHOWN = (
    "live", "live_peak", "live_generated", "live_dense", "live_share", "reserved", "reserved_peak",
)  # fmt: skip
"""What is told to people of what was kept in view."""
QUALITIES = ("accuracy", "majority", "accuracy_ended", "truncated", "win_rate", "lc_win_rate")
"""In percent; more is better but of `truncated`."""


def figures(run: Run) -> list[dict[str, Any]]:
    """The figures of every answer, in order."""
    verdicts = None if run.verdicts is None else run.verdicts.preferences
    return [metrics.figures_of(row, verdicts, has_scores=run.has_scores) for row in run.rows]


def judged(rows: Figures) -> Judged:
    """The verdicts of a run's figures, for length control. A prompt that a side failed has no
    length; its difference counts as 0."""
    known = [row for row in rows if row["preference"] is not None]
    return Judged(
        {row["prompt_id"]: float(row["preference"]) for row in known},
        {
            row["prompt_id"]: 0
            if None in (row["chars"], row["baseline_chars"])
            else row["chars"] - row["baseline_chars"]
            for row in known
        },
    )


def qualities(
    run: Run, prompts: Figures, difficulty: Mapping[str, float] | None = None
) -> dict[str, Estimate]:
    """`QUALITIES` of figures by prompt, each empty where the run has none."""
    seed = int(run.config["sampling"]["seed"])
    has_verdicts = run.verdicts is not None
    return scores_of(run, prompts, "") | {
        "win_rate": metrics.win_rate(prompts, seed),
        "lc_win_rate": lc_win_rate(judged(prompts), seed, difficulty) if has_verdicts else NOTHING,
    }


def scores_of(run: Run, prompts: Figures, prefix: str) -> dict[str, Estimate]:
    """Accuracy, majority, accuracy of what ended, and share cut short of our side, or with prefix
    `baseline_` of the baseline's, in percent."""
    names = ("accuracy", "majority", "accuracy_ended", "truncated")
    if not run.has_scores:
        return dict.fromkeys(names, NOTHING)
    seed = int(run.config["sampling"]["seed"])
    return {
        "accuracy": metrics.accuracy(prompts, f"{prefix}score", seed),
        "majority": metrics.accuracy(prompts, f"{prefix}majority", seed),
        "accuracy_ended": metrics.accuracy_ended(prompts, prefix, seed),
        "truncated": metrics.accuracy(prompts, f"{prefix}truncated", seed),
    }


def summary_of(run: Run) -> dict[str, Any]:
    """What `summary.json` holds: counts, shares, quality and speed with intervals, definitions."""
    rows = figures(run)
    prompts = prompt_figures(run, rows)
    seed = int(run.config["sampling"]["seed"])
    estimates = qualities(run, prompts)
    if run.has_baseline:
        theirs = scores_of(run, prompts, "baseline_")
        estimates |= {f"baseline_{name}": estimate for name, estimate in theirs.items()}
    return {
        "run": run.name,
        "counts": metrics.counts_of(rows) | _unjudged(run),
        "shares": metrics.shares_of(rows),
        "quality": _known(estimates),
        "judge": None if run.verdicts is None else run.verdicts.judge,
        "speed": metrics.means_of(prompts, seed),
        "live_kv": _live(run, prompts, seed),
        "throughput": throughput(run),
        "task_shares": task_shares(run),
        "revisions": revisions(run),
        "definitions": metrics.DEFINITIONS,
    }


def prompt_figures(run: Run, rows: Figures) -> list[dict[str, Any]]:
    """The figures of answers as figures of prompts, in order."""
    return by_prompt(rows, has_votes=bool(run.config["task"]["has_votes"]))


def _known(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: e.to_json() for name, e in estimates.items() if e.value is not None}


def _live(run: Run, prompts: Figures, seed: int) -> dict[str, Any]:
    """Figures of what was kept in view: none of a run whose rows do not tell."""
    found = _known(live_means(prompts, seed))
    weighted = live_weighted([row.ours for row in run.rows if row.ours is not None])
    baseline = metrics.values_of(prompts, "baseline_live_generated")
    if weighted is not None:
        found["live_weighted"] = weighted
    if baseline:
        found["baseline_live_generated"] = estimate_mean(baseline, seed).to_json()
    return found


def throughput(run: Run) -> dict[str, Any] | None:
    """Answers, tokens and seconds of the passes with many prompts that this side had to itself,
    over all processes that tell; None if none does."""
    entries = [e["throughput"] for e in read_environment(run.path) if e.get("throughput")]
    if not entries:
        return None
    found = {n: sum(e[n] for e in entries) for n in ("answers", "tokens", "text_tokens", "seconds")}
    seconds = found["seconds"]
    return found | {
        "tokens_per_s": found["tokens"] / seconds if seconds else None,
        "text_tokens_per_s": found["text_tokens"] / seconds if seconds else None,
        "batch": sorted({e["batch"] for e in entries}),
    }


def revisions(run: Run) -> list[str | None]:
    """The revisions of the code that measured the run, each once: more than one, if it was gone on
    with after a change."""
    entries = read_environment(run.path)
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
    lines += _live_lines(summary)
    lines += [f"{side}: {_listed(shares)}" for side, shares in summary["task_shares"].items()]
    lines += [f"shares: {_listed(summary['shares'])}", _listed(summary["counts"])]
    return "\n\n".join([format_table(means), "\n".join(lines)])


def _live_lines(summary: Mapping[str, Any]) -> list[str]:
    live, speed = summary["live_kv"], summary["throughput"]
    means = {name: live[name]["value"] for name in SHOWN if name in live}
    lines = [f"live KV: {_listed(means)}"] if means else []
    if speed is not None and speed["tokens_per_s"] is not None:
        lines.append(f"throughput: {speed['tokens_per_s']:.1f} tokens/s")
    return lines


def _listed(values: Mapping[str, float | None]) -> str:
    known = {name: value for name, value in values.items() if value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in known.items())


def task_shares(run: Run) -> dict[str, dict[str, float]]:
    """Of each side, the means of the task's shares over all answers; a failed one has 0."""
    found: dict[str, dict[str, float]] = {}
    for side in ("ours", "baseline"):
        notes = [a.shares for row in run.rows if (a := getattr(row, side)) is not None]
        names = dict.fromkeys(name for note in notes for name in note)
        if names:
            found[side] = {n: sum(d.get(n, 0.0) for d in notes) / len(run.rows) for n in names}
    return found
