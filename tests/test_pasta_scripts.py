"""The PASTA experiment's scripts: a file that is missing, locked or malformed is told in a line."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.bench.experiment import told
from stretto.data.rows import Answer, prompt_id
from stretto.data.store import Store

PASTA = Path(__file__).resolve().parents[1] / "benchmarks" / "pasta"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script as its command does; its status and what it told, which is no traceback."""
    monkeypatch.syspath_prepend(PASTA)

    def run(name: str, *arguments: object) -> tuple[int, str]:
        for module in ("points", "instruct"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(PASTA / f"{name}.py"), run_name="__main__")
        return int(end.value.code or 0), capsys.readouterr().err

    return run


def lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(prompt: str, text: str) -> dict[str, Any]:
    counts = ("num_prompt_tokens", "sequential_steps", "completion_tokens", "control_tokens")
    return {
        "prompt_id": prompt_id(prompt), "text": text, "finish_reason": "stop", "ids": [],
        "origins": "", **dict.fromkeys(counts, 3),
    }  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder in which all scripts find what they read."""
    rows = [answer("asked", "A short answer.")]
    lines(tmp_path / "answers.jsonl", *rows)
    lines(tmp_path / "points.jsonl", *rows)
    lines(tmp_path / "prompts.jsonl", {"prompt": "asked"})
    lines(tmp_path / "data" / "a.jsonl", {"instruction": "asked", "response": "one"})
    row = {"prompt_id": "x", "response": "a", "annotated": "a", "annotator": "structure"}
    lines(tmp_path / "annotated.jsonl", row)
    return tmp_path


READS = {
    "points": ("answers.jsonl", "prompts.jsonl"),
    "tidy": ("answers.jsonl", "points.jsonl", "prompts.jsonl"),
    "mix": ("annotated.jsonl",),
    "prompts": ("data/a.jsonl",),
    "references": ("data/a.jsonl", "prompts.jsonl"),
}


def arguments_of(name: str, place: Path) -> list[object]:
    own = {
        "points": ["answers.jsonl", "--prompts", "prompts.jsonl"],
        "tidy": ["answers.jsonl", "--points", "points.jsonl", "--prompts", "prompts.jsonl"],
        "mix": ["annotated.jsonl"],
        "prompts": ["--data", "data"],
        "references": ["--data", "data", "--prompts", "prompts.jsonl"],
    }[name]
    files = [part if part.startswith("--") else place / part for part in own]
    rest = ["--rows", "10"] if name == "mix" else []
    return [*files, *rest, "--out", place / "out.jsonl"]


CASES = [(name, file) for name, files in READS.items() for file in files]


@pytest.mark.parametrize("fault", ["missing", "malformed", "cut off", "no text", "a folder"])
@pytest.mark.parametrize(("name", "file"), CASES)
def test_a_file_that_cannot_be_read_is_one_line(
    name: str, file: str, fault: str, place: Path, script: Run
) -> None:
    path = place / file
    path.unlink()
    if fault == "malformed":
        lines(path, [1])
    elif fault == "cut off":
        path.write_text('{"prompt": "as')
    elif fault == "no text":
        names = ("prompt", "instruction", "text", "annotated", "source")
        lines(path, {key: ["x"] for key in names})
    elif fault == "a folder":
        path.mkdir()
    code, said = script(name, *arguments_of(name, place))
    assert code != 0
    assert said.count("\n") == 1
    assert str(path if fault != "missing" else path.parent) in said
    assert not (place / "out.jsonl").exists() or name == "points"


def test_an_output_that_another_process_writes_is_one_line(place: Path, script: Run) -> None:
    with Store(place / "out.jsonl", Answer):
        code, said = script("points", *arguments_of("points", place))
    assert (code, said.count("\n")) == (2, 1)
    assert "being written by another process" in said


@pytest.mark.parametrize("name", ["tidy", "mix", "references"])
def test_an_output_that_cannot_be_written_is_one_line(name: str, place: Path, script: Run) -> None:
    (place / "out.jsonl").mkdir()
    code, said = script(name, *arguments_of(name, place))
    assert code != 0
    assert said.count("\n") == 1
    assert "out.jsonl" in said


def test_prompts_of_no_file_are_named(place: Path, script: Run) -> None:
    lines(place / "prompts.jsonl", {"prompt": "another"})
    long = " ".join(f"word{n}" for n in range(40))
    lines(place / "answers.jsonl", answer("asked", long) | {"completion_tokens": 500})
    code, said = script("tidy", *arguments_of("tidy", place))
    assert (code, said.count("\n")) == (2, 1)
    assert prompt_id("asked") in said


@pytest.mark.parametrize("odd", [("--rows", "0"), ("--plain", "-1"), ("--plain", "nan")])
def test_numbers_that_say_nothing_are_one_line(
    odd: tuple[str, str], place: Path, script: Run
) -> None:
    code, said = script("mix", *arguments_of("mix", place), *odd)
    assert (code, said.count("\n")) == (2, 1)


def test_prompts_with_a_lone_surrogate_are_written(place: Path, script: Run) -> None:
    row = {"instruction": "asked \ud800", "response": "one \ud800"}
    lines(place / "data" / "a.jsonl", row)
    lines(place / "prompts.jsonl", {"prompt": row["instruction"]})
    assert script("references", *arguments_of("references", place))[0] == 0
    found = json.loads((place / "out.jsonl").read_text())
    assert found == {"prompt": row["instruction"], "reference": row["response"]}


# -- the page --------------------------------------------------------------------------------------

SHIPPED = "pasta-bon-0.25"


@pytest.fixture
def page() -> dict[str, Any]:
    """What `render.py` defines."""
    return runpy.run_path(str(PASTA / "render.py"))


def compared(results: Path, folder: str, content: Any) -> Path:
    path = results / folder / "compare.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    "content",
    ["{", "[]", {}, {"runs": 3}, {"runs": [{}]}, {"runs": [{"run": SHIPPED}]},
     {"runs": [{"run": SHIPPED, "win_rate": 1.0}]}],
    ids=str,
)  # fmt: skip
def test_a_comparison_that_is_none_is_one_line(
    content: Any, tmp_path: Path, page: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = compared(tmp_path, "report/instruct", content)
    assert told(lambda: len(page["render"](tmp_path))) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(path) in said


@pytest.mark.parametrize("folder", ["report/instruct", "validation/compared", "scores/compared"])
def test_every_run_of_a_table_is_explained_at_the_top(folder: str, page: dict[str, Any]) -> None:
    told = " ".join(page["ARMS"])
    path = PASTA.parent / "results" / "pasta" / folder / "compare.json"
    runs = json.loads(path.read_text())["runs"]
    for name in (run["run"] for run in runs):
        general = re.sub(r"^pasta-bon-(\d+|inf)$", "pasta-bon-λ", name)
        ending = name.removeprefix("pasta-bon-0.25")
        assert any(f"`{form}`" in told for form in (name, general, ending)), name


def test_rows_that_are_none_are_one_line(
    tmp_path: Path, page: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    compared(tmp_path, "report/instruct", {"runs": [{"run": "a"}]})
    rows = tmp_path / "eval" / SHIPPED / "rows.jsonl.gz"
    rows.parent.mkdir(parents=True)
    rows.write_bytes(b"no archive")
    (rows.parent / "config.json").write_text('{"place": {"engine": "hf", "dtype": "float32"}}')
    assert told(lambda: len(page["render"](tmp_path))) == 2
    assert str(rows) in capsys.readouterr().err


def test_sums_are_held_against_their_goal(tmp_path: Path, page: dict[str, Any]) -> None:
    run = {"run": "eval-multipart-pasta", "theoretical": 2.5, "theoretical_low": 2.4,
           "theoretical_high": 2.6}  # fmt: skip
    line = {"run": run["run"], "figure": "accuracy", "low": -4.0, "high": 1.0}
    for value, is_met in ((-1.0, True), (-3.0, False)):
        found = {"runs": [run], "paired": [line | {"value": value}]}
        compared(tmp_path, "report/multipart", found)
        told_goal = next(
            text for text in page["section"]("multipart", tmp_path) if "within 2 points" in text
        )
        assert told_goal.startswith("- met" if is_met else "- **missed**")
        assert f"{value} points (-4.0 to +1.0), 2.50 (2.40–2.60) times fewer steps" in told_goal


def test_a_penalty_is_told_with_what_was_tried(tmp_path: Path, page: dict[str, Any]) -> None:
    compared(tmp_path, "report/penalised", {"runs": [{"run": "a", "wins": 50.0, "wins_low": 40.0,
                                                      "wins_high": 60.0}]})  # fmt: skip
    rows = [{"penalty": 1.0, "ended": 82.5}, {"penalty": 1.1, "ended": 97.5}]
    (tmp_path / "penalty").mkdir()
    (tmp_path / "penalty" / "chosen.json").write_text(json.dumps({"rows": rows, "penalty": 1.1}))
    text = "\n".join(page["section"]("penalised", tmp_path))
    assert "Answers that end, by penalty: 1: 82 %, 1.1: 98 %. Chosen: 1.1." in text
    assert "| a | 50.0 (40.0–60.0) |" in text


def test_an_error_that_is_no_users_keeps_its_traceback() -> None:
    def broken() -> int:
        raise OSError("of no file")

    with pytest.raises(OSError, match="of no file"):
        told(broken)
    assert told(lambda: 3) == 3
