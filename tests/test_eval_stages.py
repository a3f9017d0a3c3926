"""The PASTA experiment's evaluation stages: commands that parse, and runs kept between stages."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from stretto import cli
from stretto.bench.stages import Folders, Stage, work_through
from stretto.errors import UnknownName

PASTA = Path(__file__).resolve().parents[1] / "benchmarks" / "pasta"


@pytest.fixture
def pasta(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules `stages` and `reproduce` of the experiment."""
    return {name: loaded(name, monkeypatch) for name in ("stages", "reproduce")}


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the experiment, which is no package."""
    monkeypatch.syspath_prepend(PASTA)
    monkeypatch.delitem(sys.modules, "instruct", raising=False)
    spec = importlib.util.spec_from_file_location(name, PASTA / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def options_of(command: tuple[str, ...]) -> dict[str, Any]:
    """The options of a `stretto` command; refused as on the command line."""
    node: Any = typer.main.get_command(cli.app)
    args = list(command[command.index("stretto") + 1 :])
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
    base = "likelihood:smollm2-135m-instruct"  # not the default of `run`, which is an arm
    shown = [o for o in options if "folders" in o]
    arms = {}
    for name in ("eval", "eval-penalised"):
        runs = [o for o in options if o.get("arm") and str(o["out"]) == name]
        untils = [o.pop("until") for o in runs]
        assert untils == sorted(set(untils))
        assert untils[-1] == size.eval_prompts
        assert all(o == runs[0] for o in runs)  # one run, gone on with
        own = arms[name] = [f"{name}/{arm.partition('=')[0]}" for arm in runs[0]["arm"]]
        judges = [o["judge"] for o in shown if "judge_url" in o and folders_of(o) == own]
        assert judges == ["reference", base]
    compared = [o for o in shown if "judge_url" not in o]
    both = ("likelihood", "reference")
    assert [o["judge"] for o in compared] == [*both * 3, "likelihood", "likelihood", None]
    plain, penalised = arms.values()
    untimed = [str(o["out"]) for o in options if o.get("pairs") == 0]
    against = ["eval/apar", *(arm for arm in plain if arm != "eval/apar")]
    wanted = [plain, plain, against, against, penalised, penalised, plain, penalised, untimed]
    assert [folders_of(o) for o in compared] == wanted
    assert {"eval", "eval-penalised", "report", *untimed} == {s.folder for s in stages}


def folders_of(options: dict[str, Any]) -> list[str]:
    return [str(path) for path in options["folders"]]


@pytest.mark.parametrize("sizes", ["NORMAL", "FULL", "QUICK"])
def test_a_penalty_is_chosen_by_the_baseline_alone_and_then_handed_on(
    sizes: str, pasta: dict[str, Any]
) -> None:
    stages = {s.name: s for s in pasta["stages"].stages_of(getattr(pasta["stages"], sizes))}
    *runs, choose = stages["penalty"].commands
    options = [options_of(run) for run in runs]
    penalties = [o.pop("repetition_penalty") for o in options]
    assert penalties == sorted(set(penalties))
    outs = [str(o.pop("out")) for o in options]
    assert all(o == options[0] for o in options)
    assert (options[0]["model"], options[0]["baseline"]) == ("sft-baseline/model", "none")
    assert choose == ("python", "penalty.py", "choose", *outs, "--out", "penalty/chosen.json")
    asked = {str(p) for p in options[0]["prompts"]}
    for name, stage in stages.items():
        if name.startswith("eval-penalised-to"):
            (command,) = stage.commands
            assert command[:4] == ("python", "penalty.py", "with", choose[-1])
            assert not asked & {str(p) for p in options_of(command)["prompts"]}


@pytest.mark.parametrize("name", ["validation", "scores"])
def test_untimed_stages_are_judged_by_two_and_keep_both(name: str, pasta: dict[str, Any]) -> None:
    (stage,) = (s for s in pasta["stages"].stages_of(pasta["stages"].NORMAL) if s.name == name)
    run, find, *others = stage.commands
    references = find[find.index("--out") + 1]
    judges = [o for o in map(options_of, others) if "judge_url" in o]
    assert [(o["judge"], list(o["references"])) for o in judges] == [
        ("reference", [Path(references)]), ("likelihood:smollm2-135m-instruct", []),
    ]  # fmt: skip
    prompts = options_of(run)["prompts"]
    assert [Path(find[find.index("--prompts") + 1])] == list(prompts) == list(judges[0]["prompts"])
    arms = [arm.partition("=")[0] for arm in options_of(run)["arm"]]
    assert {
        f"{arm}/verdicts.{o['judge'].partition(':')[0]}.jsonl" for arm in arms for o in judges
    } <= {*stage.keeps}
    outs = {str(o["out"]) for o in map(options_of, others) if "judge_url" not in o}
    assert outs == {f"{name}/{kept}" for kept in stage.keeps if kept.startswith("compared")}


def test_references_are_answers_to_the_prompts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"instruction": "asked", "response": "one"}, {"instruction": "other", "response": "no"},
        {"instruction": "asked", "response": "two"}, {"instruction": "empty", "response": " "},
    ]  # fmt: skip
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("asked", "empty")))
    told = ["references", "--data", str(tmp_path / "data"), "--prompts", str(prompts)]
    monkeypatch.setattr(sys, "argv", [*told, "--out", str(out)])
    assert loaded("references", monkeypatch).main() == 0
    assert "2 references, to 1 of 2 prompts" in capsys.readouterr().err
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"prompt": "asked", "reference": text} for text in ("one", "two")
    ]


def test_a_second_judge_has_a_column_where_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"run": "pasta", "win_rate": 50.0, "win_rate_low": 40.0, "win_rate_high": 60.0}
    run |= dict.fromkeys(("well_formed", "two_at_once", "cut", "redundant"))
    for folder, rate in (("compared", 50.0), ("compared-reference", 51.5)):
        path = tmp_path / "scores" / folder / "compare.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"runs": [run | {"win_rate": rate}]}))
    render = loaded("render", monkeypatch)
    lines = "\n".join(render.section("scores", tmp_path)).splitlines()
    assert "| run | win | win by references |" in lines
    assert "| pasta | 50.0 (40.0–60.0) | 51.5 (40.0–60.0) |" in lines


def test_stages_of_one_folder_go_on_with_what_was_kept(tmp_path: Path) -> None:
    first, second = (Stage(name, 1, (), ("a/rows.jsonl",), "eval") for name in ("one", "two"))
    here = Folders(tmp_path / "here", tmp_path / "kept")
    rows = here.work / "eval" / "a" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    for stage, text in ((first, "1\n"), (second, "1\n2\n")):
        rows.write_text(text)
        here.keep(stage, {"stage": stage.name})
    assert json.loads((tmp_path / "kept" / "two" / "stage.json").read_text()) == {"stage": "two"}
    there = Folders(tmp_path / "there", tmp_path / "kept")
    assert [there.is_done(stage) for stage in (first, second)] == [True, True]
    there.restore(first)
    assert (there.work / "eval" / "a" / "rows.jsonl").read_text() == "1\n2\n"
    assert [p.name for p in (there.work / "eval").iterdir()] == ["a"]


def test_a_stage_that_was_kept_of_other_commands_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = Folders(tmp_path / "work", tmp_path / "kept")
    stage = Stage("one", 1, (("python", "a.py", "--x", "1"),), ("rows.jsonl",))
    (folders.work / "one").mkdir(parents=True)
    (folders.work / "one" / "rows.jsonl").write_text("1\n")
    folders.keep(stage, {"commands": ["python a.py --x 1"]})
    told = []
    for value in "12":
        stages = [replace(stage, commands=(("python", "a.py", "--x", value),))]
        assert work_through(stages, folders, tmp_path, only_list=True) == 0
        told.append(capsys.readouterr().err.partition(": ")[2].strip())
    assert told[0] == "done"
    kept = folders.results / "one"
    assert told[1] == f"done, by other commands; delete {kept} to run it anew"


def test_only_some_stages_are_run_and_finished_ones_put_back(tmp_path: Path) -> None:
    script = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[1])"
    (tmp_path / "write.py").write_text(script)
    names = ("one", "two", "three")
    stages = [
        Stage(n, 1, (("python", "write.py", f"{n}/{n}.txt"),), keeps=(f"{n}.txt",)) for n in names
    ]
    folders = Folders(tmp_path / "work", tmp_path / "results")
    assert work_through(stages, folders, tmp_path, only=["one"]) == 0
    fresh = replace(folders, work=tmp_path / "elsewhere")
    assert work_through(stages, fresh, tmp_path, only=["three"]) == 0
    assert {p.name for p in fresh.work.rglob("*.txt")} == {"one.txt", "three.txt"}
    assert [fresh.is_done(stage) for stage in stages] == [True, False, True]
    with pytest.raises(UnknownName, match="unknown stage 'four'"):
        work_through(stages, folders, tmp_path, only=["four"])


def test_the_command_lists_stages_and_tells_what_it_cannot_do(
    tmp_path: Path, pasta: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def asked(*arguments: str) -> tuple[int, str, str]:
        told = ["--data", str(tmp_path / "data"), "--work", str(tmp_path / "work"), *arguments]
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *told])
        code = pasta["reproduce"].main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    code, out, _ = asked("--list")
    assert (code, out.count("name the folder that holds them with --data")) == (2, 1)
    stages = pasta["stages"]
    for name in (stages.VICUNA, *stages.REFERENCES, "data/instruct/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    code, out, _ = asked("--list", "--quick", "--until", "report-all")
    assert (code, out.partition(";")[0]) == (2, "unknown stage 'report-all'")
    code, out, err = asked("--list", "--quick", "--until", "distill")
    assert (code, len(out.splitlines())) == (0, 2)
    assert "2/" in err
    code, out, err = asked("--list", "--quick", "--only", "distill")
    assert (code, len(out.splitlines()), err.count("/")) == (0, 1, 1)
    assert (tmp_path / "work" / "quick" / "data").resolve() == tmp_path / "data"
