"""Arms, each a model that was trained in one way, and cells, each a way to decode an arm's model.

All arms learn the same problems in the same order from the same first weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW, BLOCK = 320, 32
"""Tokens of an answer without a plan at most, and of a block of it."""

WINDOWS = ("--dialect", "planned", "--window", str(WINDOW))


@dataclass(frozen=True)
class Arm:
    """How a model is trained: rows, the model that it begins with, and options of `train sft`."""

    rows: str
    start: str
    options: tuple[str, ...]


ARMS: Mapping[str, Arm] = {
    "autoregressive": Arm("pasta", "plain", ("--baseline",)),
    "pasta": Arm("pasta", "pasta", ("--dialect", "pasta")),
    "sparse": Arm("planned", "planned", ("--dialect", "planned", "--variant", "sparse")),
    "dense": Arm("planned", "planned", ("--dialect", "planned", "--variant", "dense")),
    "diffusion": Arm("pasta", "planned", WINDOWS),
    "blocks": Arm("pasta", "planned", (*WINDOWS, "--block", str(BLOCK))),
    "no-topics": Arm("no-topics", "planned", ("--dialect", "planned", "--variant", "sparse")),
    "one-round": Arm("one-round", "planned", ("--dialect", "planned", "--variant", "sparse")),
}
STARTS = tuple(sorted({arm.start for arm in ARMS.values()}))
ROWS = tuple(dict.fromkeys(arm.rows for arm in ARMS.values()))


@dataclass(frozen=True)
class Cell:
    """A way to decode. `group`: what it is a knob of; `knob`: which, and how far it is turned."""

    name: str
    arm: str
    group: str
    knob: str = ""
    method: str = "auto"
    params: Mapping[str, Any] = field(default_factory=dict)


def _knobs(arm: str, **knobs: Mapping[str, Any]) -> list[Cell]:
    """A cell for each setting of each knob, and one with none."""
    cells = [Cell(arm, arm, arm)]
    for knob, settings in knobs.items():
        for text, params in settings.items():
            cells.append(Cell(f"{arm} {knob}={text}", arm, arm, f"{knob}={text}", params=params))
    return cells


def _ratios(*values: float) -> dict[str, dict[str, Any]]:
    return {str(value): {"steps_ratio": value} for value in values}


def _thresholds(*values: float) -> dict[str, dict[str, Any]]:
    return {str(value): {"threshold": value} for value in values}


def _orders(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {"order": name, "steps_ratio": 0.5} for name in names}


def _lengths(*values: float) -> dict[str, dict[str, Any]]:
    return {str(value): {"length_scale": value} for value in values}


EARLY = {"early": {"early_finish": True}}


def _without_plan(arm: str, method: str, **knobs: Mapping[str, Any]) -> list[Cell]:
    return [
        Cell(c.name, c.arm, c.group, c.knob, method, {**c.params, "early_finish": True})
        for c in _knobs(arm, **knobs)
    ]


CELLS: tuple[Cell, ...] = (
    Cell("autoregressive", "autoregressive", "autoregressive", method="sequential"),
    Cell("pasta", "pasta", "pasta"),
    *_knobs(
        "sparse",
        r=_ratios(0.5, 0.25, 0.125),
        tau=_thresholds(0.99, 0.9, 0.7, 0.5),
        order=_orders("confidence", "margin", "random"),
        length=_lengths(0.5, 1.5, 2.0),
        finish=EARLY,
    ),
    *_knobs("dense", r=_ratios(0.5, 0.25, 0.125), tau=_thresholds(0.99, 0.9, 0.7, 0.5)),
    *_knobs("no-topics", tau=_thresholds(0.9)),
    *_knobs("one-round", tau=_thresholds(0.9)),
    *_without_plan(
        "diffusion",
        f"diffusion,window={WINDOW}",
        r=_ratios(0.5, 0.25, 0.125, 0.0625),
        tau=_thresholds(0.9),
    ),
    *_without_plan(
        "blocks",
        f"diffusion,window={WINDOW},block={BLOCK}",
        r=_ratios(0.5),
        tau=_thresholds(0.99, 0.9, 0.7, 0.5),
    ),
)
"""All ways, each named after its model and the knob that is turned. Without a plan spans may end
at their first filler, since a window is far longer than most answers."""

COMPUTE_ARMS = ("autoregressive", "sparse", "dense", "diffusion")
"""Arms that are also trained on less."""


def compute_cells(shares: tuple[str, ...]) -> tuple[Cell, ...]:
    """The plain ways of arms that were trained for a share of the epochs."""
    plain = {c.arm: c for c in CELLS if not c.knob and c.arm in COMPUTE_ARMS}
    return tuple(
        Cell(f"{arm} {share}", f"{arm}-{share}", arm, f"compute={share}", c.method, c.params)
        for share in shares
        for arm, c in plain.items()
    )
