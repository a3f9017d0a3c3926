"""The repetition penalty of the PASTA experiment: what is chosen, of which runs, and handed on."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from eval_runs import config, row, write

from stretto.errors import InvalidInput

PASTA = Path(__file__).resolve().parents[1] / "benchmarks" / "pasta"


@pytest.fixture(scope="module")
def penalty() -> Any:
    return SimpleNamespace(**runpy.run_path(str(PASTA / "penalty.py")))


@pytest.mark.parametrize(
    ("ended", "wanted"),
    [
        ({1.0: 75, 1.1: 94.9, 1.2: 95.0, 1.3: 100}, 1.2),
        ({1.0: 95, 1.1: 94}, 1.0),
        ({1.0: 10, 1.1: 60, 1.2: 60, 1.3: 50}, 1.1),
    ],
)
def test_the_least_that_is_enough_is_chosen(
    penalty: Any, ended: dict[float, float], wanted: float
) -> None:
    rows = [{"penalty": key, "ended": value} for key, value in ended.items()]
    assert penalty.choice(rows) == wanted
    assert penalty.choice(rows[::-1]) == wanted


def test_a_command_is_run_with_the_penalty_after_it(penalty: Any, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.json"
    chosen.write_text(json.dumps({"penalty": 1.1}))
    line = penalty.with_penalty(chosen, ["stretto", "eval", "run", "--out", "a"])
    begin = [sys.executable, "-m", "stretto", "eval", "run", "--out", "a"]
    assert line == [*begin, "--repetition-penalty", "1.1"]


def run(folder: Path, penalty: float, ends: str, model: str = "m") -> Path:
    """A run's folder: a prompt a letter, "s" for an answer that stops, "l" for one cut short."""
    words = {"s": "stop", "l": "length"}
    own = config(baseline=None)
    own["ours"]["model"] = model
    own["task"]["num_prompts"] = len(ends)
    own["sampling"] |= {"repetition_penalty": penalty}
    rows = [row(number, str(number)) | {"baseline": None} for number in range(1, len(ends) + 1)]
    for one, end in zip(rows, ends, strict=True):
        one["ours"]["finish_reason"] = words[end]
    return write(folder, config=own, rows=rows)


def test_runs_that_differ_in_more_than_the_penalty_are_refused(
    penalty: Any, tmp_path: Path
) -> None:
    plain = run(tmp_path / "1", 1.0, "sl" * 10)
    more = run(tmp_path / "2", 1.2, "s" * 19 + "l")
    penalty.choose([more, plain], tmp_path / "chosen.json")
    told = json.loads((tmp_path / "chosen.json").read_text())
    assert told["penalty"] == 1.2
    assert told["rows"] == [
        {"penalty": 1.0, "answers": 20, "ended": 50.0},
        {"penalty": 1.2, "answers": 20, "ended": 95.0},
    ]
    with pytest.raises(InvalidInput, match="in more than its penalty"):
        penalty.choose([plain, run(tmp_path / "3", 1.3, "s" * 20, "other")], tmp_path / "x")
    with pytest.raises(InvalidInput, match="that another run has"):
        penalty.choose([plain, run(tmp_path / "4", 1.0, "s" * 20)], tmp_path / "x")
    assert not (tmp_path / "x").exists()
