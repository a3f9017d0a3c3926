"""The planned experiment: stages whose commands parse and find what they read; rows of all forms;
figures and claims of made-up answers."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from stretto import LM, cli
from stretto.data.markup import chunks_of, stripped
from stretto.dialects import get_dialect
from stretto.eval.multipart import problems
from stretto.models.tiny import make_tiny
from stretto.tokens import ModelCard

PLANNED = Path(__file__).resolve().parents[1] / "benchmarks" / "planned"
SIZES = ("NORMAL", "FULL", "QUICK")
SCRIPTS = ("stages", "cells", "prepare", "answers", "figures", "report")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The experiment's scripts by name; other experiments have scripts of the same names."""
    monkeypatch.syspath_prepend(str(PLANNED))
    before = {name: sys.modules.pop(name, None) for name in SCRIPTS}
    yield {name: _load(name) for name in ("cells", "answers", "figures", "prepare", "stages")}
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


@pytest.mark.parametrize("sizes", SIZES)
def test_commands_parse_and_read_what_stages_before_them_made(
    sizes: str, scripts: dict[str, Any]
) -> None:
    cells = scripts["cells"]
    found = scripts["stages"].stages_of(getattr(scripts["stages"], sizes))
    assert len({stage.name for stage in found}) == len(found)
    assert all(stage.minutes <= 40 for stage in found)
    made = {f"data/start-{start}" for start in cells.STARTS}
    made |= {f"data/{rows}.jsonl" for rows in cells.ROWS}
    for stage in found:
        for command in stage.commands:
            option = dict(itertools.pairwise(command))
            if command[0] == "stretto":
                node: Any = typer.main.get_command(cli.app)
                args = list(command[1:])
                while hasattr(node, "commands"):
                    node = node.commands[args.pop(0)]
                node.make_context("stretto", args)
                assert {option["--model"], option["--data"]} <= made
                made.add(stage.folder)
            else:
                assert (PLANNED / command[1]).is_file()
            if "--cells" in command:
                asked = scripts["answers"].cells_of(option["--cells"])
                assert {cell.arm for cell in asked} <= made


def test_arms_differ_in_nothing_but_what_they_are_named_for(scripts: dict[str, Any]) -> None:
    stages, cells = scripts["stages"], scripts["cells"]
    kinds = set()
    for stage in stages.stages_of(stages.NORMAL):
        for command in stage.commands:
            if command[:3] == ("stretto", "train", "sft"):
                own = {*cells.ARMS[stage.name.partition("-0.")[0]].options}
                own |= {"--epochs", "--out", "--model", "--data"}
                pairs = zip(command, (*command[1:], ""), strict=True)
                rest = [(a, b) for a, b in pairs if a.startswith("--") and a not in own]
                kinds.add(tuple(rest))
    assert len(kinds) == 1


def test_cells_are_ways_that_there_are(scripts: dict[str, Any]) -> None:
    from stretto import SamplingParams
    from stretto.methods import check_method

    cells = scripts["cells"]
    every = [*cells.CELLS, *cells.compute_cells(("0.5",))]
    assert len({cell.name for cell in every}) == len(every)
    for cell in every:
        SamplingParams(**cell.params)
        arm = cells.ARMS[cell.arm.removesuffix("-0.5")]
        dialect = arm.options[1] if "--dialect" in arm.options else "plain"
        check_method(cell.method, dialect)
    groups = {cell.group for cell in every}
    assert groups == set(cells.ARMS)


def test_rows_of_all_forms_are_of_the_same_problems(scripts: dict[str, Any]) -> None:
    prepare = scripts["prepare"]
    symbols = prepare.vocabulary_of(list(prepare.rows_in("pasta", 60, 0, len)))
    plain = make_tiny("tiny-1m", symbols)

    def count(text: str) -> int:
        return len(plain.vocabulary.encode(text))

    forms = {form: list(prepare.rows_in(form, 5, 0, count)) for form in scripts["cells"].ROWS}
    for form, rows in forms.items():
        assert [row["response"] for row in rows] == [p.response for p in problems(0, 5, "train")]
        assert all(stripped(row["annotated"]) == row["response"] for row in rows)
        syncs = {row["annotated"].count("<sync/>") for row in rows}
        assert syncs == ({0} if form == "one-round" else {1})
        topics = {c.topic for row in rows for c in chunks_of(row["annotated"])}
        assert topics == {""} if form == "no-topics" else {"part 1", "part 2"} <= topics
        assert all(count(row["response"]) <= scripts["cells"].WINDOW for row in rows)
    longest = max(count(p.response) for p in problems(3, 60, "test"))
    assert longest <= scripts["cells"].WINDOW
    assert max(count("part 3"), count(" Now.")) == 2


def test_first_models_share_their_weights(scripts: dict[str, Any], tmp_path: Path) -> None:
    import torch

    scripts["prepare"].write_models(tmp_path, "tiny-1m", ["a", "b"], 3)
    found = {d: LM.load(tmp_path / f"start-{d}", dtype="float32") for d in ("plain", "planned")}
    forms = get_dialect("planned").forms(ModelCard())
    tables = [lm.model.get_input_embeddings().weight for lm in found.values()]
    assert len(tables[1]) - len(tables[0]) == len(forms)
    assert torch.equal(tables[0], tables[1][: len(tables[0])])
    assert found["planned"].card.dialect == "planned"


def test_answers_are_given_once(scripts: dict[str, Any], tmp_path: Path) -> None:
    """In two ways, by a model of random weights; a second run finds nothing to do."""
    answers, cells = scripts["answers"], scripts["cells"]
    prepare = scripts["prepare"]
    symbols = prepare.vocabulary_of(list(prepare.rows_in("pasta", 60, 0, len)))
    made = make_tiny("tiny-1m", symbols, dialect="planned")
    made.save(tmp_path / "blocks" / "model")
    few = [c for c in cells.CELLS if c.name in ("blocks tau=0.5",)]
    asked, out = problems(1, 2, "test"), tmp_path / "answers.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        answers.answer_all(few, asked, out)
        before = out.read_bytes()
        answers.answer_all(few, asked, out)
    assert out.read_bytes() == before
    rows = [json.loads(line) for line in before.splitlines()]
    assert len(rows) == 2
    assert {row["cell"] for row in rows} == {few[0].name}
    assert all(row["steps"] > 0 and row["seconds"] > 0 for row in rows)


def made_up(scripts: dict[str, Any], quality: float, took: float, name: str) -> Any:
    answers, rng, rows = scripts["answers"], random.Random(name), {}
    for k in range(40):
        right = float(rng.random() < quality)
        rows[str(k)] = answers.Decoded(
            cell=name, prompt_id=str(k), text="", finish="stop", right=right,
            parts=quality, sums=1.0, steps=int(took * 100), completion_tokens=200,
            control_tokens=9, seconds=took * rng.uniform(0.9, 1.1), decode_s=took, peak_slots=9,
            issues=[],
        )  # fmt: skip
    group = name.split(" ", 1)[0]
    cell = scripts["cells"].Cell(name, group, group, name.partition(" ")[2])
    return scripts["figures"].Measured(cell, rows)


def test_claims_are_read_off_the_table(scripts: dict[str, Any]) -> None:
    figures = scripts["figures"]
    ways = (
        ("autoregressive", 0.9, 1.0), ("sparse", 0.895, 0.7), ("sparse r=0.5", 0.86, 0.4),
        ("dense", 0.9, 0.72), ("diffusion", 0.85, 4.0), ("diffusion r=0.5", 0.7, 2.0),
        ("blocks tau=0.9", 0.88, 0.3), ("no-topics", 0.5, 0.7), ("one-round", 0.95, 0.7),
    )  # fmt: skip
    measured = [made_up(scripts, *way[1:], name=way[0]) for way in ways]
    table = [figures.table_row(m, measured[0]) for m in measured]
    told = {claim["claim"]: claim for claim in figures.claims(table, "parts")}
    assert told["a speed-up of 1.27 within 1.0 points"]["holds"]
    assert told["a speed-up of 1.27 within 1.0 points"]["cell"] in ("sparse", "dense")
    assert told["a speed-up of 1.81 within 5.4 points"]["cell"] == "sparse r=0.5"
    assert told["planned is as fast and as good as each way of diffusion"]["holds"]
    assert not told["planned is as fast and as good as each way of blocks"]["holds"]
    assert told["no-topics is worse"]["holds"]
    assert not told["one-round is worse"]["holds"]
    frontier = figures.on_frontier(table, "parts")
    assert (frontier[0], frontier[-1]) == ("blocks tau=0.9", "one-round")
    assert "diffusion" not in frontier
    for row in table:
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    rows = [row for m in measured for row in m.rows.values()]
    kept = figures.of_cells([m.cell for m in measured], rows[:-1])
    assert [m.cell.name for m in kept] == [way[0] for way in ways[:-1]]
