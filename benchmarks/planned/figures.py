"""Figures of cells over the same problems, with bootstrap intervals, and what they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from answers import Decoded
from cells import Cell

from stretto.eval.statistics import (
    NOTHING,
    Estimate,
    estimate_geometric,
    estimate_mean,
    paired_difference,
    paired_ratio,
)

REFERENCE = "autoregressive"
SEED = 0
TO_BEAT = ((1.27, 1.0), (1.81, 5.4))
"""A speed-up over autoregressive decoding, and the points of quality that it may cost."""


@dataclass(frozen=True)
class Measured:
    """A cell's answers by problem. All cells of an experiment have the same problems."""

    cell: Cell
    rows: Mapping[str, Decoded]

    def of(self, figure: Callable[[Decoded], float]) -> list[float]:
        """A figure of each answer, in the order of the problems' names."""
        return [figure(self.rows[name]) for name in sorted(self.rows)]


def right(row: Decoded) -> float:
    return 100 * row.right


def parts(row: Decoded) -> float:
    return 100 * row.parts


def seconds(row: Decoded) -> float:
    return row.seconds


def of_cells(cells: Sequence[Cell], rows: Sequence[Decoded]) -> list[Measured]:
    """The answers of cells, where all have the problems of the first one; others are left out."""
    found: dict[str, dict[str, Decoded]] = {}
    for row in rows:
        found.setdefault(row.cell, {})[row.prompt_id] = row
    names = set(found.get(REFERENCE, {}))
    return [
        Measured(c, found[c.name]) for c in cells if names and set(found.get(c.name, ())) == names
    ]


def table_row(measured: Measured, reference: Measured) -> dict[str, Any]:
    """Qualities in percent, seconds and steps of an answer, and all of them against the
    reference: points more, and times faster. Arms that learnt less are answered in another process,
    so that they are not timed against it."""
    is_timed = not measured.cell.knob.startswith("compute")
    ratio = paired_ratio(reference.of(seconds), measured.of(seconds), SEED)
    estimates: dict[str, Estimate] = {
        "right": estimate_mean(measured.of(right), SEED),
        "parts": estimate_mean(measured.of(parts), SEED),
        "seconds": estimate_geometric(measured.of(seconds), SEED),
        "steps": estimate_mean(measured.of(lambda row: row.steps), SEED),
        "right_over_reference": paired_difference(measured.of(right), reference.of(right), SEED),
        "parts_over_reference": paired_difference(measured.of(parts), reference.of(parts), SEED),
        "speedup": ratio if is_timed else NOTHING,
    }
    row: dict[str, Any] = {
        "cell": measured.cell.name,
        "group": measured.cell.group,
        "knob": measured.cell.knob,
        "problems": len(measured.rows),
        "unfinished": sum(r.finish != "stop" for r in measured.rows.values()),
        "with_issues": sum(bool(r.issues) for r in measured.rows.values()),
        "tokens": estimate_mean(measured.of(lambda r: r.completion_tokens), SEED).value,
    }
    for name, estimate in estimates.items():
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return row


def on_frontier(rows: Sequence[Mapping[str, Any]], quality: str) -> list[str]:
    """The cells that no other one beats in both time and quality, fastest first."""
    best, found = float("-inf"), []
    for row in sorted(rows, key=lambda r: (r["seconds"], -r[quality])):
        if row[quality] > best:
            best = row[quality]
            found.append(row["cell"])
    return found


def claims(table: Sequence[Mapping[str, Any]], quality: str) -> list[dict[str, Any]]:
    """What was to be shown, and whether it is so, in one quality. Ablations and comparisons are
    between means; their intervals are in the table."""
    rows = {row["cell"]: row for row in table}
    planned = [r for r in table if r["group"] in ("sparse", "dense") and "compute" not in r["knob"]]
    found = [_beats(planned, quality, *goal) for goal in TO_BEAT]
    for group in ("diffusion", "blocks"):
        rivals = [r for r in table if r["group"] == group and "compute" not in r["knob"]]
        beaten = [r["cell"] for r in rivals if _is_beaten(r, planned, quality)]
        found.append(
            {
                "claim": f"planned is as fast and as good as each way of {group}",
                "holds": len(beaten) == len(rivals) > 0,
                "beaten": beaten,
                "of": len(rivals),
            }
        )
    for ablation in ("no-topics", "one-round"):
        if ablation in rows and "sparse" in rows:
            gap = rows["sparse"][quality] - rows[ablation][quality]
            found.append({"claim": f"{ablation} is worse", "holds": gap > 0, "points": gap})
    return found


def _beats(
    planned: Sequence[Mapping[str, Any]], quality: str, speedup: float, points: float
) -> dict[str, Any]:
    """Whether a cell is that fast, its interval too, at that cost of quality at most."""
    fit = [r for r in planned if r[f"{quality}_over_reference"] >= -points]
    best = max(fit, key=lambda r: r["speedup"], default=None)
    told = {"claim": f"a speed-up of {speedup} within {points} points", "cell": None}
    if best is None:
        return {**told, "holds": False}
    own = {name: best[name] for name in ("cell", "speedup", "speedup_low", "speedup_high")}
    own["points"] = best[f"{quality}_over_reference"]
    return {**told, **own, "holds": best["speedup_low"] > speedup}


def _is_beaten(
    rival: Mapping[str, Any], planned: Sequence[Mapping[str, Any]], quality: str
) -> bool:
    return any(r["seconds"] <= rival["seconds"] and r[quality] >= rival[quality] for r in planned)
