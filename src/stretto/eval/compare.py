"""Runs side by side: refused where they are not comparable, else a table with paired intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.bench.report import to_csv
from stretto.errors import InvalidInput
from stretto.eval.folder import Run, first_difference, write_json
from stretto.eval.job import EVERY
from stretto.eval.lcwr import difficulties
from stretto.eval.live import DEFINITIONS as LIVE_DEFINITIONS
from stretto.eval.live import live_means
from stretto.eval.metrics import means_of, percent, shares_of, values_of
from stretto.eval.scaled import DEFINITIONS as SCALED_DEFINITIONS
from stretto.eval.scaled import on_one_scale, rates
from stretto.eval.statistics import Estimate, paired_difference, paired_ratio
from stretto.eval.summary import (
    QUALITIES,
    Figures,
    figures,
    judged,
    prompt_figures,
    qualities,
    task_shares,
    throughput,
)
from stretto.files import write_atomically

COMPARED_RATIOS = ("realized", "theoretical", "parallelism")
ENDED_RATIOS = (
    "realized_ended", "theoretical_ended", "realized_baseline_ended", "theoretical_baseline_ended",
)  # fmt: skip
ALL_RATIOS = (*COMPARED_RATIOS, "end_to_end", "efficiency", "matched", *ENDED_RATIOS)
SHOWN = ("threads", "two_at_once", "well_formed", "redundant", "redundant_threads")
"""What threads did, in the table for people."""
SHOWN_LIVE = ("live_generated", "live_share")
"""What was kept in view, there."""

DEFINITIONS = {
    "lc_win_rate": "as in a run's summary, with the difficulty of every prompt estimated from the "
    "runs compared, if there are several",
    "difference": "of a quality: mean over prompts of this run less the first one, in points, over "
    "the prompts that both have; 95% interval by the bootstrap over prompts, both runs drawn "
    "together",
    "threads": "mean threads of an answer, main included, over prompts with an answer",
    "redundant": "share of all forked threads that are redundant, as in a run's summary",
    "unjoined": "share of all forked threads that main never read",
    "redundant_threads": "mean redundant threads of an answer, over prompts with an answer",
    "ratio": "of a speed, or of live_generated: geometric mean over prompts of this run by the "
    "first one, likewise",
    **SCALED_DEFINITIONS,
    **LIVE_DEFINITIONS,
}
SAME = ("task", "sampling", "baseline", "place")
"""Parts of the settings in which runs that are compared must agree."""


def check_comparable(runs: Sequence[Run]) -> None:
    """Raises `InvalidInput` unless all had the same prompts, sampling, baseline, engine and judge,
    naming the first difference, and no run comes twice."""
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise InvalidInput("one run is named twice; name each once")
    if len({run.name for run in runs}) < len(runs):
        raise InvalidInput("two runs have folders of one name; rename one of them")
    for run in runs[1:]:
        difference = _difference(runs[0], run)
        if difference is not None:
            raise InvalidInput(
                f"{runs[0].name} and {run.name} cannot be compared: {difference}; measure both in "
                "the same way"
            )


def _difference(one: Run, two: Run) -> str | None:
    """What keeps two runs from being compared, named; None if nothing does."""
    where = (f"in {one.name}", f"in {two.name}")
    for key in SAME:
        found = first_difference(one.config[key], two.config[key], key, where)
        if found is not None:
            return found
    warm = first_difference(warm_of(one), warm_of(two), "warm", where)
    if warm is not None and one.config["pairs"] and two.config["pairs"]:
        return warm
    for a, b in zip(one.rows, two.rows, strict=True):
        if a.prompt_id != b.prompt_id:
            return f"prompt {a.number} is {a.prompt_id} {where[0]} and {b.prompt_id} {where[1]}"
    return first_difference(judge_of(one), judge_of(two), "judge", where)


def warm_of(run: Run) -> str:
    """When the sides of a run were warmed up, which is told since there is a choice."""
    return str(run.config.get("warm", EVERY))


def judge_of(run: Run) -> str | None:
    """The identity of who judged a run, if anybody did."""
    return None if run.verdicts is None else run.verdicts.judge


def compare(runs: Sequence[Run], seed: int = 0) -> dict[str, Any]:
    """`runs`: a flat row for each. `paired`: of each run but the first and each figure that both
    have, the paired difference or ratio to the first. Preferences of judge `likelihood` are put on
    one scale. Raises as `check_comparable`."""
    check_comparable(runs)
    uncharged, runs = on_one_scale(runs, is_charged=False), on_one_scale(runs)
    answers = {run.name: figures(run) for run in runs}
    tables = {run.name: prompt_figures(run, answers[run.name]) for run in runs}
    difficulty = None
    if all(run.verdicts is not None for run in runs):
        difficulty = difficulties([judged(table) for table in tables.values()])
    rows = [
        _row(run, answers[run.name], tables[run.name], difficulty, seed)
        | _all_named(rates(run, other, tables[run.name], seed))
        for run, other in zip(runs, uncharged, strict=True)
    ]
    first = tables[runs[0].name]
    paired = [
        {"run": run.name, "to": runs[0].name} | line
        for run in runs[1:]
        for line in _paired(tables[run.name], first, seed)
    ]
    return {"runs": rows, "paired": paired, "judge": judge_of(runs[0]), "definitions": DEFINITIONS}


def text_of(result: Mapping[str, Any]) -> str:
    """The comparison for people: a table of runs, then one of paired differences."""
    from stretto.bench.report import format_table

    shown = [_shown(row) for row in result["runs"]]
    paired = [{k: v for k, v in line.items() if k != "to"} for line in result["paired"]]
    first = result["runs"][0]["run"]
    parts = [format_table(shown)]
    if paired:
        parts.append(f"paired with {first}:\n{format_table(paired)}")
    return "\n\n".join(parts)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: figures with their intervals in one column each, what nobody has left
    out by `None`."""
    shown: dict[str, Any] = {"run": row["run"], "prompts": row["prompts"]}
    shown["failures"] = row["failures"]
    for name in (*QUALITIES, *ALL_RATIOS, *SHOWN_LIVE):
        shown[name] = None
        if row[name] is not None:
            digits = 2 if name in (*ALL_RATIOS, "live_share") else 1
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            shown[name] = f"{row[name]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
    return shown | {name: row[name] for name in SHOWN}


def save(out: Path, result: Mapping[str, Any]) -> None:
    """Writes `runs.csv`, `paired.csv` (where there is more than one run) and `compare.json`."""
    write_atomically(out / "runs.csv", to_csv(result["runs"]).encode())
    if result["paired"]:
        write_atomically(out / "paired.csv", to_csv(result["paired"]).encode())
    write_json(out / "compare.json", dict(result))


def _row(
    run: Run, answers: Figures, table: Figures, difficulty: Mapping[str, float] | None, seed: int
) -> dict[str, Any]:
    """A run's row. `table`: the figures of its answers by prompt."""
    means = means_of(table, seed)
    row: dict[str, Any] = {
        "run": run.name,
        "model": run.config["ours"]["model"],
        "method": run.config["ours"]["method"],
        "prompts": len(table),
        "answers": len(answers),
        "failures": sum(f["error"] is not None for f in answers),
    }
    row |= _all_named(qualities(run, table, difficulty))
    for name in ALL_RATIOS:
        mean = means[name]
        row |= _named(name, Estimate(mean["geometric_mean"], mean["low"], mean["high"]))
        row |= {f"{name}_arithmetic": mean["arithmetic_mean"], f"{name}_left_out": mean["left_out"]}
    row |= _all_named(live_means(table, seed))
    shares = task_shares(run).get("ours", {})
    return row | shares_of(answers) | _threads(answers) | _speed(run) | shares


def _speed(run: Run) -> dict[str, float | None]:
    """Tokens a second of passes with many prompts, where they were measured."""
    found = throughput(run)
    return {"tokens_per_s": None if found is None else found["tokens_per_s"]}


def _threads(table: Figures) -> dict[str, float | None]:
    """What threads there were, and how many say again what an earlier one says."""
    forked, redundant = values_of(table, "forked"), values_of(table, "redundant")
    num_answers = len(forked)
    unjoined = sum(values_of(table, "unjoined"))
    return {
        "threads": 1 + sum(forked) / num_answers if num_answers else None,
        "redundant": sum(redundant) / sum(forked) if sum(forked) else None,
        "unjoined": unjoined / sum(forked) if sum(forked) else None,
        "redundant_threads": sum(redundant) / num_answers if num_answers else None,
    }


def _all_named(estimates: Mapping[str, Estimate]) -> dict[str, float | None]:
    named: dict[str, float | None] = {}
    for name, estimate in estimates.items():
        named |= _named(name, estimate)
    return named


def _named(name: str, estimate: Estimate) -> dict[str, float | None]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _paired(table: Figures, first: Figures, seed: int) -> list[dict[str, Any]]:
    lines = []
    qualities_by_key = (("score", "accuracy"), ("majority", "majority"), ("preference", "win_rate"))
    for key, name in qualities_by_key:
        ours, theirs = _both(table, first, key)
        estimate = percent(paired_difference(ours, theirs, seed))
        lines.append(_line(name, "difference", estimate, len(ours), len(table)))
    for key in (*ALL_RATIOS, "live_generated"):
        ours, theirs = _both(table, first, key)
        estimate = paired_ratio(ours, theirs, seed)
        lines.append(_line(key, "ratio", estimate, len(ours), len(table)))
    return [line for line in lines if line["prompts"]]


def _line(figure: str, kind: str, estimate: Estimate, prompts: int, size: int) -> dict[str, Any]:
    counts = {"prompts": prompts, "left_out": size - prompts}
    return {"figure": figure, "kind": kind, **estimate.to_json(), **counts}


def _both(table: Figures, first: Figures, key: str) -> tuple[list[float], list[float]]:
    """A figure in both runs, of the prompts on which both have it."""
    pairs = zip((f[key] for f in table), (f[key] for f in first), strict=True)
    known = [(float(a), float(b)) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]
