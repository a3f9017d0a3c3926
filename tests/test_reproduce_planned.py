"""The planned experiment: stages whose commands parse and find what they read; rows of all forms;
answers that are given once, in an order of each problem's own."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from planned_scripts import PLANNED, loaded

from stretto import LM, SamplingParams, cli
from stretto.data.markup import chunks_of, stripped
from stretto.eval.multipart import problems
from stretto.eval.restricted import BlindSession
from stretto.methods import get_method
from stretto.methods.diffusion import Window
from stretto.models.tiny import make_tiny
from stretto.tokens.asked import unread

SIZES = ("NORMAL", "FULL", "QUICK")
GROUPS = ["one", "few", "whole"]


@pytest.fixture
def scripts() -> Iterator[dict[str, Any]]:
    with loaded() as found:
        yield found


@pytest.mark.parametrize("sizes", SIZES)
def test_commands_parse_and_read_what_stages_before_them_made(
    sizes: str, scripts: dict[str, Any]
) -> None:
    cells, module = scripts["cells"], scripts["stages"]
    found = module.stages_of(getattr(module, sizes))
    assert len({stage.name for stage in found}) == len(found)
    assert all(stage.minutes <= 40 for stage in found) or sizes == "FULL"
    made = {"data/start"}
    made |= {f"data/{group}-{rows}.jsonl" for group in GROUPS for rows in cells.ROWS}
    for stage in found:
        for command in stage.commands:
            option = dict(itertools.pairwise(command))
            if command[0] == "stretto":
                node: Any = typer.main.get_command(cli.app)
                args = list(command[1:])
                while hasattr(node, "commands"):
                    node = node.commands[args.pop(0)]
                node.make_context("stretto", args)
                assert {option["--model"], *data_of(command)} <= made
                assert option["--out"].partition("/")[0] == stage.folder
                made |= {option["--out"], f"{option['--out']}/model"}
            else:
                assert (PLANNED / command[1]).is_file()
                given = scripts[command[1].removesuffix(".py")].parser().parse_args(command[2:])
                made.add(str(given.out))
                assert "group" not in given or [own.name for own in given.group] == GROUPS
                assert "answers" not in given or str(given.answers) in made
            if "--cells" in command:
                assert needed(option["--cells"], scripts) <= made
    assert "report" in made


def data_of(command: tuple[str, ...]) -> list[str]:
    return [value for name, value in itertools.pairwise(command) if name == "--data"]


def needed(ways: str, scripts: dict[str, Any]) -> set[str]:
    """Models that the ways are of, and the file that names them."""
    if ways.startswith("chosen="):
        return {*scripts["cells"].ARMS, ways.removeprefix("chosen=")}
    return {cell.arm for cell in scripts["answers"].cells_of(ways)}


def test_no_problem_is_answered_twice_in_the_same_way(scripts: dict[str, Any]) -> None:
    """All test problems are other ones than those that ways are chosen on, and than each other."""
    answers, stages = scripts["answers"], scripts["stages"]
    asked: Counter[tuple[str, str, int]] = Counter()
    for stage in stages.stages_of(stages.NORMAL):
        for command in stage.commands:
            if command[1] == "answers.py":
                given = answers.parser().parse_args(command[2:])
                kind = given.cells.partition("=")[0]
                ways = kind if kind in ("compute", "costly") else "all"
                numbers = range(given.first, given.first + given.num)
                asked.update((given.split, ways, number) for number in numbers)
    sizes = stages.NORMAL
    assert set(asked.values()) == {1}
    assert sum(key[:2] == ("valid", "all") for key in asked) == sizes.valid
    assert sum(key[:2] == ("valid", "costly") for key in asked) == sizes.valid
    assert sum(key[:2] == ("test", "costly") for key in asked) == sizes.costly <= sizes.test
    assert sum(key[:2] == ("test", "all") for key in asked) == sizes.test + sizes.more


def test_the_whole_experiment_takes_some_five_hours(scripts: dict[str, Any]) -> None:
    stages = scripts["stages"]
    found = stages.stages_of(stages.NORMAL)
    assert sum(stage.minutes for stage in found) <= 5.2 * 60
    assert all(stage.minutes <= 35 for stage in found)


def test_all_arms_go_on_from_one_base_that_is_autoregressive(scripts: dict[str, Any]) -> None:
    cells, stages = scripts["cells"], scripts["stages"]
    found = {stage.name: stage for stage in stages.stages_of(stages.NORMAL)}
    (base,) = found["base"].commands
    option = dict(itertools.pairwise(base))
    assert (option["--model"], option["--out"]) == ("data/start", "base")
    assert data_of(base) == [f"data/{group}-pasta.jsonl" for group in GROUPS]
    assert "--baseline" in base
    assert {"model", "metrics.jsonl"} <= {*found["base"].keeps}
    runs = {arm: cells.ARMS[arm].epochs for arm in cells.ARMS}
    for run, times in (runs | {f"{arm}-0.5": 0.5 for arm in cells.COMPUTE_ARMS}).items():
        (command,) = found[run].commands
        option = dict(itertools.pairwise(command))
        assert (option["--model"], option["--out"]) == ("base/model", run)
        assert float(option["--epochs"]) == times * stages.NORMAL.own.epochs
        assert {"model", "metrics.jsonl"} <= {*found[run].keeps}


def test_arms_differ_in_nothing_but_what_they_are_named_for(scripts: dict[str, Any]) -> None:
    stages, cells = scripts["stages"], scripts["cells"]
    kinds = set()
    for stage in stages.stages_of(stages.NORMAL):
        for command in stage.commands:
            if command[:3] == ("stretto", "train", "sft"):
                arm = "autoregressive" if stage.name == "base" else cells.arm_of(stage.name)
                own = {*cells.ARMS[arm].options}
                own |= {"--epochs", "--out", "--model", "--data"}
                pairs = zip(command, (*command[1:], ""), strict=True)
                rest = [(a, b) for a, b in pairs if a.startswith("--") and a not in own]
                kinds.add(tuple(rest))
    assert len(kinds) == 1


def test_all_that_write_blocks_have_the_same_knobs(scripts: dict[str, Any]) -> None:
    cells = scripts["cells"]
    knobs = {
        arm: {c.knob for c in cells.CELLS if c.arm == arm and not c.knob.startswith("length")}
        for arm in ("sparse", "dense", "diffusion", "blocks")
    }
    assert knobs["sparse"] == knobs["dense"]
    assert knobs["diffusion"] == knobs["blocks"] == knobs["sparse"] - {"finish=early"}
    assert len(knobs["blocks"]) == 12
    bare = [c for c in cells.CELLS if c.arm in ("diffusion", "blocks")]
    assert all(cell.params["early_finish"] for cell in bare)


def test_cells_are_ways_that_there_are(scripts: dict[str, Any]) -> None:
    """A model of a window is run as it was trained, and no setting is one that nobody reads."""
    cells = scripts["cells"]
    every = [*cells.CELLS, *cells.compute_cells(("0.5",))]
    assert len({cell.name for cell in every}) == len(every)
    for cell in every:
        options = cells.ARMS[cell.arm.removesuffix("-0.5")].options
        given = dict(itertools.pairwise(options))
        window = None
        if "--window" in given:
            block = given.get("--block")
            window = Window.of(int(given["--window"]), None if block is None else int(block))
        method = get_method(cell.method, given.get("--dialect", "plain"), window)
        assert not SamplingParams(**cell.params).set_of(unread(method))
    assert {cell.arm for cell in cells.CELLS} == set(cells.ARMS)
    assert {cell.group for cell in every} == set(cells.ARMS) - {cells.LONGER}


def test_rows_of_all_forms_are_of_the_same_problems(scripts: dict[str, Any]) -> None:
    prepare = scripts["prepare"]
    symbols = prepare.vocabulary_of(list(prepare.rows_in("pasta", 60, 0, len)))
    plain = make_tiny("tiny-1m", symbols)

    def count(text: str) -> int:
        return len(plain.vocabulary.encode(text))

    for form in scripts["cells"].ROWS:
        rows = list(prepare.rows_in(form, 5, 0, count))
        assert [row["response"] for row in rows] == [
            p.response for p in problems(0, 5, "train", kinds=scripts["cells"].KINDS)
        ]
        assert all(stripped(row["annotated"]) == row["response"] for row in rows)
        syncs = {row["annotated"].count("<sync/>") for row in rows}
        assert syncs == ({0} if form == "one-round" else {1})
        topics = {c.topic for row in rows for c in chunks_of(row["annotated"])}
        assert topics == {""} if form == "no-topics" else {"part 1", "part 2"} <= topics
        assert all(count(row["response"]) <= scripts["cells"].WINDOW for row in rows)
    longest = max(count(p.response) for p in problems(3, 60, "test", kinds=scripts["cells"].KINDS))
    assert longest <= scripts["cells"].WINDOW
    assert max(count("part 3"), count(" Now.")) == 2


def test_what_is_prepared_has_all_groups_in_all_forms(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece of any is unknown to the vocabulary; a second run changes nothing."""
    line = "prepare.py --group one:1:6 --group few:2-3:6 --group whole:4-5:3 --shape tiny-1m --out"
    monkeypatch.setattr("sys.argv", [*line.split(), str(tmp_path)])
    assert scripts["prepare"].main() == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    names = {f"{group}-{form}.jsonl" for group in GROUPS for form in scripts["cells"].ROWS}
    assert {path.name for path in before} == names
    known = set(json.loads((tmp_path / "vocabulary.json").read_text()))
    for path, data in before.items():
        rows = [json.loads(line) for line in data.splitlines()]
        parts = {"one": (1, 1), "few": (2, 3), "whole": (4, 5)}[path.name.partition("-")[0]]
        asked = problems(0, len(rows), "train", parts, scripts["cells"].KINDS)
        assert [row["prompt"] for row in rows] == [p.prompt for p in asked]
        assert set(scripts["prepare"].vocabulary_of(rows)) <= known
        assert all(stripped(row["annotated"]) == row["response"] for row in rows)
    assert scripts["prepare"].main() == 0
    assert {path: path.read_bytes() for path in before} == before


def test_answers_are_given_once(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two ways, by a model of random weights; a second run finds nothing to do, and one after a
    kill does all of the problem that was not finished, and puts aside what there was."""
    answers, out = scripts["answers"], tmp_path / "answers.jsonl"
    save_random(scripts, tmp_path / "sparse" / "model")
    few = few_of(scripts, "sparse tau=0.5", "sparse r=0.0625")
    asked = problems(1, 2, "test")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answers, "MAX_TOKENS", 80)
    answers.answer_all(few, asked, out)
    before = out.read_bytes()
    answers.answer_all(few, asked, out)
    assert out.read_bytes() == before
    lines = before.splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    assert Counter(row["cell"] for row in rows) == {few[0].name: 2, few[1].name: 2}
    assert all(row["steps"] > 0 and row["seconds"] > 0 for row in rows)
    out.write_bytes(b"".join(lines[:3]))
    answers.answer_all(few, asked, out)
    again = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert again[:2] == rows[:2]
    assert [(r["cell"], r["text"]) for r in again] == [(r["cell"], r["text"]) for r in rows]
    assert out.with_suffix(".unfinished").read_bytes() == lines[2]


def test_at_the_cost_of_a_larger_model_answers_are_the_same_to_the_letter(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger model, here a small one, is run with the very rows; what was moved out of both
    pools comes back to both."""
    answers, costly = scripts["answers"], scripts["costly"]
    save_random(scripts, tmp_path / "sparse" / "model")
    monkeypatch.setattr(answers, "MAX_TOKENS", 80)
    lm, prompt = answers.load(str(tmp_path / "sparse")), problems(1, 1, "test")[0].prompt
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    (slow,) = costly.made_costly([lm], **small, hidden_size=128, intermediate_size=64)
    fed: dict[str, list[int]] = {"decides": [], "pays": []}
    for name, seen in fed.items():
        engine = getattr(slow.engine, name)

        def forward(runs: Any, own: Any = engine.forward, seen: list[int] = seen) -> Any:
            seen.append(sum(len(run.tokens) for run in runs))
            return own(runs)

        monkeypatch.setattr(engine, "forward", forward)
    cells = few_of(scripts, "sparse tau=0.5", "sparse r=0.25")
    texts = [answers.answer(slow, cell, prompt).text for cell in cells]
    assert fed["pays"] == fed["decides"] != []
    assert texts == [answers.answer(lm, cell, prompt).text for cell in cells]
    assert len(fed["pays"]) < len(fed["decides"])
    slow.engine.copy_in([2, 3], slow.engine.copy_out([0, 1]))
    for engine in (slow.engine.decides, slow.engine.pays):
        first, second = (tensors(engine.copy_out(slots)) for slots in ([0, 1], [2, 3]))
        assert len(first) == len(second) > 0
        assert all(map(torch.equal, first, second))


def tensors(kept: Any) -> list[torch.Tensor]:
    """All that an engine has copied out."""
    return [kept] if isinstance(kept, torch.Tensor) else [t for own in kept for t in tensors(own)]


def test_without_joins_main_does_not_read_its_threads(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same model: a cell says which, and the model itself is as it was."""
    cells, answers = scripts["cells"], scripts["answers"]
    pair = few_of(scripts, "pasta", "no-sync")
    assert [(cell.arm, cell.joins) for cell in pair] == [("pasta", True), ("pasta", False)]
    assert all(cell.joins for cell in cells.CELLS if cell.name != "no-sync")
    made = make_tiny("tiny-1m", ["a"], dialect="pasta")
    lm = LM.wrap(made.model, made.tokenizer, card=made.card, pool_slots=512)
    is_blind: list[bool] = []

    def submit(self: LM, prompt: str, params: SamplingParams, **options: Any) -> Any:
        is_blind.append(isinstance(self.session(params), BlindSession))
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setattr(LM, "submit", submit)
    for cell in (*pair, pair[0]):
        answers.answer(lm, cell, "Hello")
    assert is_blind == [False, True, False]


def save_random(scripts: dict[str, Any], folder: Path) -> None:
    prepare = scripts["prepare"]
    symbols = prepare.vocabulary_of(list(prepare.rows_in("pasta", 60, 0, len)))
    make_tiny("tiny-1m", symbols, dialect="planned").save(folder)


def few_of(scripts: dict[str, Any], *names: str) -> list[Any]:
    return [cell for cell in scripts["cells"].CELLS if cell.name in names]


def test_each_problem_has_an_order_of_its_own(scripts: dict[str, Any]) -> None:
    """So that no way comes first, or after one and the same other way, more often than by luck."""
    cells, ordered = scripts["cells"].CELLS, scripts["answers"].ordered
    orders = [ordered(cells, f"{k:016x}") for k in range(60)]
    assert orders[3] == ordered(cells, f"{3:016x}")
    assert all(sorted(c.name for c in o) == sorted(c.name for c in cells) for o in orders)
    firsts = Counter(order[0].name for order in orders)
    before = Counter(a.name for o in orders for a, b in itertools.pairwise(o) if b.arm == "pasta")
    assert max(firsts.values()) <= 8
    assert max(before.values()) <= 8


def test_twice_the_promised_length_fits(scripts: dict[str, Any]) -> None:
    prepare, cells = scripts["prepare"], scripts["cells"]
    made = make_tiny("tiny-1m", prepare.vocabulary_of(list(prepare.rows_in("pasta", 60, 0, len))))

    def count(text: str) -> int:
        return len(made.vocabulary.encode(text))

    most = 0
    for row in prepare.rows_in("planned", 200, 7, count):
        chunks = chunks_of(row["annotated"])
        plan = sum(count(chunk.topic) + 6 for chunk in chunks)
        most = max(most, plan + 2 * sum(chunk.tokens for chunk in chunks))
    assert most <= scripts["answers"].MAX_TOKENS
    assert cells.WINDOW <= scripts["answers"].MAX_TOKENS < scripts["answers"].POOL_SLOTS


def test_throughput_is_of_the_same_work(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets of problems on a model of random weights: the same answers, but for ties."""
    save_random(scripts, tmp_path / "sparse" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scripts["answers"], "MAX_TOKENS", 80)
    cell = few_of(scripts, "sparse tau=0.5")[0]
    prompts = [problem.prompt for problem in problems(1, 4, "test")]
    lm = scripts["answers"].load(cell.arm, pool_slots=4096)
    told = scripts["throughput"].measured(lm, cell, [prompts[:2], prompts[2:]])
    assert (told["sets"], told["of"], len(told["pairs"])) == (2, 4, 2)
    assert told["ratio_low"] <= told["ratio"] <= told["ratio_high"]
    assert told["same_texts"] >= 3
    for pair in told["pairs"]:
        assert pair["alone"]["seconds"] > 0
        assert pair["together"]["seconds"] > 0
    ways = {c.name for c in scripts["cells"].CELLS}
    assert set(scripts["throughput"].WAYS) <= ways
