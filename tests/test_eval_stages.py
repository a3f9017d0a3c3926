"""The PASTA experiment's evaluation stages: commands that parse, and runs kept between stages."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from stretto import cli

PASTA = Path(__file__).resolve().parents[1] / "benchmarks" / "pasta"


@pytest.fixture
def pasta(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules `stages` and `reproduce` of the experiment."""
    loaded = {}
    for name in ("stages", "reproduce"):
        spec = importlib.util.spec_from_file_location(name, PASTA / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        loaded[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, loaded[name])
        spec.loader.exec_module(loaded[name])
    return loaded


def options_of(command: tuple[str, ...]) -> dict[str, Any]:
    """The options of a `stretto` command; refused as on the command line."""
    node: Any = typer.main.get_command(cli.app)
    args = list(command[1:])
    while hasattr(node, "commands"):
        node = node.commands[args.pop(0)]
    return dict(node.make_context("stretto", args).params)


@pytest.mark.parametrize("sizes", ["NORMAL", "FULL", "QUICK"])
def test_evaluation_stages_measure_what_the_report_compares(
    sizes: str, pasta: dict[str, Any]
) -> None:
    size = getattr(pasta["stages"], sizes)
    stages = [s for s in pasta["stages"].stages_of(size) if s.name.startswith(("eval", "report"))]
    commands = [c for stage in stages for c in stage.commands]
    options = [options_of(command) for command in commands]
    runs = [o for o in options if o.get("arm")]
    untils = [o.pop("until") for o in runs]
    assert untils == sorted(set(untils))
    assert untils[-1] == size.eval_prompts
    assert all(o == runs[0] for o in runs)  # one run, gone on with
    arms = [f"eval/{arm.partition('=')[0]}" for arm in runs[0]["arm"]]
    shown = [o for o in options if "folders" in o]
    (judged,) = ([str(path) for path in o["folders"]] for o in shown if "judge_url" in o)
    compared = [[str(path) for path in o["folders"]] for o in shown if "judge_url" not in o]
    untimed = [str(o["out"]) for o in options if o.get("pairs") == 0]
    assert judged == compared[0] == compared[1] == arms
    assert compared[2] == untimed
    made = {s.folder for s in stages}
    assert {"eval", "report", *untimed} == made


def test_stages_of_one_folder_go_on_with_what_was_kept(
    tmp_path: Path, pasta: dict[str, Any]
) -> None:
    stage_of, folders_of = pasta["stages"].Stage, pasta["reproduce"].Folders
    first, second = (stage_of(name, 1, (), ("a/rows.jsonl",), "eval") for name in ("one", "two"))
    here = folders_of(tmp_path / "here", tmp_path / "kept")
    rows = here.work / "eval" / "a" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    for stage, text in ((first, "1\n"), (second, "1\n2\n")):
        rows.write_text(text)
        here.keep(stage, {"stage": stage.name})
    assert json.loads((tmp_path / "kept" / "two" / "stage.json").read_text()) == {"stage": "two"}
    there = folders_of(tmp_path / "there", tmp_path / "kept")
    assert [there.is_done(stage) for stage in (first, second)] == [True, True]
    there.restore(first)
    assert (there.work / "eval" / "a" / "rows.jsonl").read_text() == "1\n2\n"
    assert [p.name for p in (there.work / "eval").iterdir()] == ["a"]
