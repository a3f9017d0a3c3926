"""Arms, each a model that was trained in one way, and cells, each a way to decode an arm's model.

All arms go on from one autoregressive model, the base, and learn the same problems in the same
order. All that write blocks are decoded with the same settings of the same knobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.eval.multipart import SUMS

WINDOW, BLOCK = 320, 32
"""Tokens of an answer without a plan at most, and of a block of it."""

KINDS = SUMS
"""Of parts of problems."""

PLANNED = ("--dialect", "planned")
WINDOWS = (*PLANNED, "--window", str(WINDOW))


BASE = "base"
"""What all arms go on from, as Dream went on from an autoregressive model: one that has learnt to
look a problem up in its prompt, so that an arm has its form to learn and not that as well."""


@dataclass(frozen=True)
class Arm:
    """How a model is trained: rows, and options of `train sft`; for `epochs` times as many epochs
    as others. `cost`: tokens that an example puts through the model, by those of the reference,
    about: for estimates of time."""

    rows: str
    options: tuple[str, ...]
    cost: float = 1.0
    epochs: float = 1.0


REFERENCE = "autoregressive"
LONGER = "autoregressive-longer"
"""A reference that learns for longer: about as many tokens as planned arms, which have two streams,
put through the model. How many is counted."""

ARMS: Mapping[str, Arm] = {
    REFERENCE: Arm("pasta", ("--baseline",)),
    LONGER: Arm("pasta", ("--baseline",), epochs=2),
    "pasta": Arm("pasta", ("--dialect", "pasta"), cost=1.1),
    "sparse": Arm("planned", (*PLANNED, "--variant", "sparse"), cost=1.9),
    "dense": Arm("planned", (*PLANNED, "--variant", "dense"), cost=1.9),
    "diffusion": Arm("pasta", WINDOWS, cost=1.2),
    "blocks": Arm("pasta", (*WINDOWS, "--block", str(BLOCK)), cost=1.8),
    "no-topics": Arm("no-topics", (*PLANNED, "--variant", "sparse"), cost=1.8),
    "one-round": Arm("one-round", (*PLANNED, "--variant", "sparse"), cost=1.8),
}
ROWS = tuple(dict.fromkeys(arm.rows for arm in ARMS.values()))


def arm_of(run: str) -> str:
    """The arm that a run is of: ARM, or ARM-SHARE where it learnt less."""
    return run if run in ARMS else run.rpartition("-")[0]


@dataclass(frozen=True)
class Cell:
    """A way to decode. `group`: what it is a knob of; `knob`: which, and how far it is turned.
    `joins` False: syncs neither wait nor join, so that main goes on blind."""

    name: str
    arm: str
    group: str
    knob: str = ""
    method: str = "auto"
    params: Mapping[str, Any] = field(default_factory=dict)
    joins: bool = True


def _knobs(arm: str, **knobs: Mapping[str, Any]) -> list[Cell]:
    """A cell for each setting of each knob, and one with none."""
    cells = [Cell(arm, arm, arm)]
    for knob, settings in knobs.items():
        for text, params in settings.items():
            cells.append(Cell(f"{arm} {knob}={text}", arm, arm, f"{knob}={text}", params=params))
    return cells


def _turned(name: str, *values: float) -> dict[str, dict[str, Any]]:
    return {str(value): {name: value} for value in values}


ORDER_RATIO = 0.25
"""Steps per token where orders are compared: with one a step they differ least."""
ORDERS = ("confidence", "margin", "random")
BLOCK_KNOBS: Mapping[str, Mapping[str, Any]] = {
    "r": _turned("steps_ratio", 0.5, 0.25, 0.125, 0.0625),
    "tau": _turned("threshold", 0.99, 0.9, 0.7, 0.5),
    "order": {name: {"order": name, "steps_ratio": ORDER_RATIO} for name in ORDERS},
}
PLAN_KNOBS: Mapping[str, Mapping[str, Any]] = {
    "length": _turned("length_scale", 0.5, 1.5, 2.0),
    "finish": {"early": {"early_finish": True}},
}
"""Of what a plan promises. Without a plan the length is the window's, and the finish early."""
ABLATIONS = ("no-topics", "one-round")
THREADS, NO_SYNC = "pasta", "no-sync"
"""The way with threads, and the same model whose main does not read them."""


def _without_plan(arm: str, method: str) -> list[Cell]:
    return [
        Cell(c.name, c.arm, c.group, c.knob, method, {**c.params, "early_finish": True})
        for c in _knobs(arm, **BLOCK_KNOBS)
    ]


CELLS: tuple[Cell, ...] = (
    Cell(REFERENCE, REFERENCE, "autoregressive", method="sequential"),
    Cell(LONGER, LONGER, "autoregressive", "epochs", method="sequential"),
    Cell(THREADS, THREADS, THREADS),
    Cell(NO_SYNC, THREADS, THREADS, NO_SYNC, joins=False),
    *_knobs("sparse", **BLOCK_KNOBS, **PLAN_KNOBS),
    *_knobs("dense", **BLOCK_KNOBS, **PLAN_KNOBS),
    *(c for arm in ABLATIONS for c in _knobs(arm, tau=_turned("threshold", 0.9))),
    *_without_plan("diffusion", f"diffusion,window={WINDOW}"),
    *_without_plan("blocks", f"diffusion,window={WINDOW},block={BLOCK}"),
)
"""All ways, each named after its model and the knob that is turned."""

COSTLY = (
    REFERENCE, THREADS, "sparse r=0.25", "sparse tau=0.9", "sparse tau=0.7", "dense tau=0.9",
    "diffusion r=0.0625", "blocks tau=0.9",
)  # fmt: skip
"""Ways that are timed at the cost of a larger model too. A pass of many rows is slow there, so they
are those of few passes."""

COMPUTE_ARMS = (REFERENCE, "sparse", "diffusion")
"""Arms that are also trained on less."""


def compute_cells(shares: tuple[str, ...]) -> tuple[Cell, ...]:
    """The plain ways of arms that were trained for a share of the epochs."""
    plain = {c.arm: c for c in CELLS if not c.knob and c.arm in COMPUTE_ARMS}
    return tuple(
        Cell(f"{arm} {share}", f"{arm}-{share}", c.group, f"compute={share}", c.method, c.params)
        for share in shares
        for arm, c in plain.items()
    )


def is_less(cell: Cell) -> bool:
    """Whether it is of an arm that learnt less: answered in another process than the others."""
    return cell.knob.startswith("compute")
