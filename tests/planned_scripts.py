"""The scripts of the planned experiment as modules, and answers that are made up."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PLANNED = Path(__file__).resolve().parents[1] / "benchmarks" / "planned"
SCRIPTS = (
    "cells", "costly", "answers", "figures", "claims", "choose", "throughput", "prepare", "stages",
    "report",
)  # fmt: skip
"""In an order in which each finds those that it imports."""


@contextmanager
def loaded() -> Iterator[dict[str, Any]]:
    """The scripts by name; other experiments have scripts of the same names."""
    before = {name: sys.modules.pop(name, None) for name in SCRIPTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLANNED))
        yield {name: _load(name) for name in SCRIPTS}
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, PLANNED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def made_up(
    scripts: Mapping[str, Any], cell: str, rights: Sequence[bool], took: float
) -> list[Any]:
    """Answers of a cell to problems 0, 1, …: half of the parts of a wrong one are right. Times
    differ by a tenth at most from problem to problem, the same way for all cells."""
    return [
        scripts["answers"].Decoded(
            cell=cell, prompt_id=str(k), text="", finish="stop", right=float(right),
            parts=1.0 if right else 0.5, sums=1.0, steps=max(1, int(took * 100)),
            completion_tokens=200, control_tokens=9, seconds=took * (1 + 0.05 * (k % 3)),
            decode_s=took * 0.9, peak_slots=9, issues=[],
        )
        for k, right in enumerate(rights)
    ]  # fmt: skip


def measured(
    scripts: Mapping[str, Any], ways: Mapping[str, tuple[Sequence[bool], float]]
) -> dict[str, Any]:
    """Cells by name, each with answers as `made_up` makes them."""
    cells = {cell.name: cell for cell in scripts["cells"].CELLS}
    rows = [row for name, way in ways.items() for row in made_up(scripts, name, *way)]
    found: dict[str, Any] = scripts["figures"].by_cell([cells[name] for name in ways], rows)
    return found


def all_but(wrong: range, num: int) -> list[bool]:
    """Whether answers are right: all but those of some numbers."""
    return [k not in wrong for k in range(num)]
