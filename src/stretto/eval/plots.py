"""Quality against speed, a point a run, with the runs that no other beats in both joined."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.bench.report import to_csv
from stretto.errors import InvalidInput, UnknownName
from stretto.eval.compare import COMPARED_RATIOS
from stretto.eval.summary import QUALITIES, baseline_accuracy, figures
from stretto.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stretto.eval.folder import Run

LABELS = {
    "realized": "realized speed-up",
    "theoretical": "theoretical speed-up",
    "parallelism": "parallelism (tokens a step)",
    "accuracy": "accuracy (%)",
    "win_rate": "win rate over the baseline (%)",
    "lc_win_rate": "length-controlled win rate (%)",
}
BASELINE = "baseline"
Point = dict[str, Any]


def choose_quality(rows: Sequence[Mapping[str, Any]], wanted: str | None) -> str:
    """The quality to plot: the one asked for, else the task's accuracy, else the length-controlled
    win rate. Raises `InvalidInput` where not all runs have it."""
    if wanted is not None and wanted not in QUALITIES:
        raise UnknownName("quality", wanted, list(QUALITIES))
    names = [wanted] if wanted is not None else ["accuracy", "lc_win_rate"]
    for name in names:
        if all(row[name] is not None for row in rows):
            return name
    raise InvalidInput(
        f"not all runs have a quality {' or '.join(names)}; judge them first (stretto eval judge)"
    )


def baseline_quality(run: Run, quality: str) -> float | None:
    """The quality of a run's baseline: its accuracy, or 50 where it is what is won against; None
    without one."""
    if not run.has_baseline:
        return None
    if quality != "accuracy":
        return 50.0
    return baseline_accuracy(run, figures(run)).value


def points_of(
    rows: Sequence[Mapping[str, Any]], speed: str, quality: str, baseline: float | None = None
) -> list[Point]:
    """A point for each run that has the speed (`rows` as of `compare`), and one for the baseline at
    speed 1 and its quality, if it has one. `on_front`: no other point is at least as good in both
    and better in one."""
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
    if baseline is not None:
        speeds = dict.fromkeys(("speed", "speed_low", "speed_high"), 1.0)
        values = dict.fromkeys(("quality", "quality_low", "quality_high"), baseline)
        points.insert(0, {"run": BASELINE, **speeds, **values})
    return [point | {"on_front": not any(_beats(p, point) for p in points)} for point in points]


def _beats(a: Point, b: Point) -> bool:
    at_least = a["speed"] >= b["speed"] and a["quality"] >= b["quality"]
    return bool(at_least and (a["speed"] > b["speed"] or a["quality"] > b["quality"]))


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
    axes.axvline(1, linestyle=":", color="gray", zorder=0)
    axes.legend(fontsize="x-small")
    return figure


def _error(point: Point, name: str) -> list[list[float]]:
    value = point[name]
    return [[max(0.0, value - point[f"{name}_low"])], [max(0.0, point[f"{name}_high"] - value)]]


def save_plots(
    out: Path, rows: Sequence[Mapping[str, Any]], quality: str, baseline: float | None
) -> list[str]:
    """Writes `realized.png`, `theoretical.png` and `parallelism.png`, a CSV of the points beside
    each; those that no run has are left out. Returns the names of the files."""
    written = []
    for speed in COMPARED_RATIOS:
        points = points_of(rows, speed, quality, baseline)
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
