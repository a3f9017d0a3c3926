"""Quality against speed, or against what is kept in view, a point a run; the runs that no other
beats in both are joined."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.bench.report import to_csv
from stretto.errors import InvalidInput, UnknownName
from stretto.eval.compare import COMPARED_RATIOS
from stretto.eval.metrics import values_of
from stretto.eval.statistics import arithmetic_mean
from stretto.eval.summary import QUALITIES, figures, prompt_figures, scores_of
from stretto.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stretto.eval.folder import Run

LABELS = {
    "realized": "realized speed-up",
    "theoretical": "theoretical speed-up",
    "parallelism": "parallelism (tokens a step)",
    "live_generated": "live KV (generated tokens, mean)",
    "accuracy": "accuracy (%)",
    "majority": "majority (%)",
    "accuracy_ended": "accuracy of what ended by itself (%)",
    "win_rate": "win rate over the baseline (%)",
    "lc_win_rate": "length-controlled win rate (%)",
}
BASELINE = "baseline"
LIVE = "live_generated"
PLOTTED = tuple(name for name in QUALITIES if name in LABELS)
Point = dict[str, Any]


def choose_quality(rows: Sequence[Mapping[str, Any]], wanted: str | None) -> str:
    """The quality to plot: the one asked for, else the task's accuracy, else the length-controlled
    win rate. Raises `InvalidInput` where not all runs have it."""
    if wanted is not None and wanted not in PLOTTED:
        raise UnknownName("quality", wanted, list(PLOTTED))
    names = [wanted] if wanted is not None else ["accuracy", "lc_win_rate"]
    for name in names:
        if all(row[name] is not None for row in rows):
            return name
    raise InvalidInput(
        f"not all runs have a quality {' or '.join(names)}; judge them first (stretto eval judge)"
    )


def baseline_quality(run: Run, quality: str) -> float | None:
    """The quality of a run's baseline: its own score, or 50 where it is what is won against; None
    without one."""
    if not run.has_baseline:
        return None
    scores = scores_of(run, prompt_figures(run, figures(run)), "baseline_")
    return scores[quality].value if quality in scores else 50.0


def baseline_live(run: Run) -> float | None:
    """The mean of live generated tokens of a run's baseline; None without one."""
    values = values_of(prompt_figures(run, figures(run)), "baseline_live_generated")
    return arithmetic_mean(values) if values else None


def points_of(
    rows: Sequence[Mapping[str, Any]], speed: str, quality: str, baseline: float | None = None,
    at: float | None = 1.0,
) -> list[Point]:  # fmt: skip
    """A point for each run that has the speed (`rows` as of `compare`), and one for the baseline at
    speed `at` and its quality, if it has both. `on_front`: no other point is at least as good in
    both and better in one. More speed is better, and less of `LIVE`."""
    points: list[Point] = [
        {
            "run": row["run"],
            "speed": row[speed],
            "speed_low": row[f"{speed}_low"],
            "speed_high": row[f"{speed}_high"],
            "quality": row[quality],
            "quality_low": row[f"{quality}_low"],
            "quality_high": row[f"{quality}_high"],
        }
        for row in rows
        if row[speed] is not None
    ]
    if baseline is not None and at is not None:
        speeds = dict.fromkeys(("speed", "speed_low", "speed_high"), at)
        values = dict.fromkeys(("quality", "quality_low", "quality_high"), baseline)
        points.insert(0, {"run": BASELINE, **speeds, **values})
    sign = -1 if speed == LIVE else 1
    return [p | {"on_front": not any(_beats(other, p, sign) for other in points)} for p in points]


def _beats(a: Point, b: Point, sign: int) -> bool:
    further = sign * (a["speed"] - b["speed"])
    at_least = further >= 0 and a["quality"] >= b["quality"]
    return bool(at_least and (further > 0 or a["quality"] > b["quality"]))


def plot(points: Sequence[Point], speed: str, quality: str) -> Figure:
    """The points with their 95 % intervals, and the front as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=LABELS[speed], ylabel=LABELS[quality])
    front = sorted((p for p in points if p["on_front"]), key=lambda p: p["speed"])
    axes.plot(
        [p["speed"] for p in front], [p["quality"] for p in front], "--", color="gray", zorder=0
    )
    for number, point in enumerate(points):
        axes.errorbar(
            [point["speed"]], [point["quality"]],
            xerr=_error(point, "speed"), yerr=_error(point, "quality"),
            marker="o", capsize=3, color="black" if point["run"] == BASELINE else f"C{number % 10}",
            label=point["run"],
        )  # fmt: skip
    if speed != LIVE:
        axes.axvline(1, linestyle=":", color="gray", zorder=0)
    axes.legend(fontsize="x-small")
    return figure


def _error(point: Point, name: str) -> list[list[float]]:
    value = point[name]
    return [[max(0.0, value - point[f"{name}_low"])], [max(0.0, point[f"{name}_high"] - value)]]


def save_plots(
    out: Path, rows: Sequence[Mapping[str, Any]], quality: str, baseline: float | None,
    live: float | None = None,
) -> list[str]:  # fmt: skip
    """Writes `realized.png`, `theoretical.png`, `parallelism.png` and `live_generated.png`, a CSV
    of the points beside each; those that no run has are left out. Returns the names of the files.
    `live`: the baseline's place in the last."""
    written = []
    for speed in (*COMPARED_RATIOS, LIVE):
        points = points_of(rows, speed, quality, baseline, live if speed == LIVE else 1.0)
        if all(point["run"] == BASELINE for point in points):
            continue
        picture = io.BytesIO()
        plot(points, speed, quality).savefig(picture, format="png", dpi=150)
        write_atomically(out / f"{speed}.png", picture.getvalue())
        write_atomically(out / f"{speed}.csv", to_csv(points).encode())
        written += [f"{speed}.png", f"{speed}.csv"]
    if not written:
        raise InvalidInput("no run has a speed to plot; measure them with a baseline")
    return written
