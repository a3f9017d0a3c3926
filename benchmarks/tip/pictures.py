"""Plots of the TIP experiment, a CSV of the points beside each."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compared import BOTH, Arm, accuracy, live

from stretto.bench.report import to_csv
from stretto.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[Mapping[str, Any]]


def save(out: Path, name: str, figure: Figure, points: Points) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomically(out / f"{name}.png", picture.getvalue())
    write_atomically(out / f"{name}.csv", to_csv(points).encode())


def _new(width: int, columns: int) -> tuple[Figure, Any]:
    """So many axes side by side, in a figure as wide as `width` of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 4.5 * width, 4), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


# -- accuracy against what is held -----------------------------------------------------------------


def save_tradeoff(out: Path, table: Points) -> None:
    """A point an arm, of the table on programs and trees."""
    figure, (axes,) = _new(2, 1)
    axes.set(xlabel="mean live generated tokens", ylabel="accuracy (%)", ylim=(-2, 102))
    points = []
    for number, row in enumerate(table):
        low, value, high = (row[name] for name in ("accuracy_low", "accuracy", "accuracy_high"))
        error = [[max(0.0, value - low)], [max(0.0, high - value)]]
        marker = "so^v"[number // 10 % 4]
        axes.errorbar(
            [row["live"]], [value], yerr=error, marker=marker, capsize=3, label=row["arm"]
        )
        names = ("arm", "live", "live_low", "live_high", "accuracy", "accuracy_low")
        points.append({name: row[name] for name in (*names, "accuracy_high")})
    figure.legend(fontsize="x-small", loc="outside right upper")
    save(out, "tradeoff", figure, points)


# -- longer problems -------------------------------------------------------------------------------

BUCKET = 4
"""Sizes to a point."""


def save_lengths(out: Path, arms: Sequence[Arm], longest: int) -> None:
    """Accuracy and live tokens by size, programs and trees. `longest`: the largest size that was
    trained on."""
    figure, (left, right) = _new(2, 2)
    left.set(xlabel="steps of the problem", ylabel="accuracy (%)", ylim=(-2, 102))
    right.set(xlabel="steps of the problem", ylabel="mean live generated tokens")
    points = []
    for arm in arms:
        own = arm.of(lambda r: r.task in BOTH)
        for start in sorted({row.size // BUCKET * BUCKET for row in own.rows}):
            part = own.of(lambda r, s=start: r.size // BUCKET * BUCKET == s)  # type: ignore[misc]
            estimate, held = part.estimate(accuracy), part.estimate(live)
            points.append(
                {
                    "arm": arm.name,
                    "size": statistics.fmean(row.size for row in part.rows),
                    "problems": len(part.by_problem(accuracy)),
                    "accuracy": estimate.value,
                    "accuracy_low": estimate.low,
                    "accuracy_high": estimate.high,
                    "live": held.value,
                }
            )
        mine = [p for p in points if p["arm"] == arm.name]
        sizes = [p["size"] for p in mine]
        left.plot(sizes, [p["accuracy"] for p in mine], marker="o", label=arm.name)
        right.plot(sizes, [p["live"] for p in mine], marker="o", label=arm.name)
    for axes in (left, right):
        axes.axvline(longest + 0.5, linestyle=":", color="gray")
    left.legend(fontsize="x-small")
    if points:
        save(out, "lengths", figure, points)


# -- training by reward ----------------------------------------------------------------------------

CURVES = {"accuracy": "accuracy", "live": "mean live generated tokens", "length": "tokens"}


def save_curves(out: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Lines of `metrics.jsonl` of each run: answers drawn while training, a line a step, and greedy
    answers to problems of the validation split as points."""
    figure, every = _new(len(CURVES), len(CURVES))
    points = []
    for number, (name, lines) in enumerate(runs.items()):
        for line in lines:
            if line["kind"] in ("train", "valid"):
                kept = {key: line[key] for key in ("kind", "step", *CURVES)}
                points.append({"run": name, **kept})
        for axes, key in zip(every, CURVES, strict=True):
            color = f"C{number % 10}"
            train = [line for line in lines if line["kind"] == "train"]
            valid = [line for line in lines if line["kind"] == "valid"]
            steps = [line["step"] for line in train]
            axes.plot(steps, [line[key] for line in train], color=color, alpha=0.6, label=name)
            axes.plot([x["step"] for x in valid], [x[key] for x in valid], "o", color=color)
    for axes, text in zip(every, CURVES.values(), strict=True):
        axes.set(xlabel="step", ylabel=text)
    every[0].legend(fontsize="x-small")
    if points:
        save(out, "grpo", figure, points)
