"""Problems with known graphs: what they are, that they stay so, and how answers are checked."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from data_kit import read_json_lines

from stretto.cli import main
from stretto.data.graphs import Graph
from stretto.data.labels import LABELS, Labels
from stretto.data.registers import max_live, needed_kills
from stretto.data.rows import Annotated, Reject, prompt_id, read_rows
from stretto.errors import InvalidInput, UnknownName
from stretto.eval.tasks import Source, get_task, load_prompts
from stretto.problems import (
    ALPHABET,
    LONGER_SIZES,
    SPLITS,
    TASKS,
    TRAIN_SIZES,
    Problem,
    parse_sizes,
    problem,
    problems,
)
from stretto.problems.base import NAMES, Step
from stretto.problems.countdown import search

LINES = ("program", "slots", "tree", "chain", "dag")
CHAIN = ("chain-4-train-0-0", "2+1=n;n+3=u;u+4=a;a-1=I;?I", "2+1=n3n3+3=u1u1+4=a0a0-1=I4?I4")
TREE = ("3+2=n;3-3=e;n+e=M;3-3=c;M+c=E;?E", "3+2=n03-3=e0n0+e0=M03-3=c0M0+c0=E0?E0")
COUNTDOWN = ("r03v09e05m01?72", "o=r+v:12B=e+m:06w=o+B:18f=o-B:06L=o*B:72?L")
LINE = re.compile(r"([a-zA-Z]\d|\d)([+-])([a-zA-Z]\d|\d)=(.)(\d)")


def some(task, count=13, sizes=TRAIN_SIZES, split="train"):
    return list(problems(task, sizes, count, split=split))


def _lines(one: Problem) -> list[tuple[str, str, str, str]]:
    return re.findall(r"(.)([+-])(.)=(.);", one.prompt)


def worked_out(one: Problem) -> dict[str, int]:
    """The values of a problem's lines, from its prompt alone."""
    values: dict[str, int] = {}
    for left, operator, right, name in _lines(one):
        a, b = (int(x) if x.isdigit() else values[x] for x in (left, right))
        values[name] = (a + b if operator == "+" else a - b) % 5
    return values


# -- what they are ---------------------------------------------------------------------------------


def test_problems_stay_the_same():
    chain = problem("chain", 4, 0)
    assert chain == problem("chain", 4, 0, split="train", seed=0)
    assert (chain.id, chain.prompt, chain.response()) == CHAIN
    assert [(p.prompt, p.response()) for p in some("tree", 1, (5, 5))] == [TREE]
    assert [(p.prompt, p.response()) for p in some("countdown", 1, (5, 5))] == [COUNTDOWN]


def test_a_problem_does_not_depend_on_what_else_is_made():
    few, many = some("dag", 5), some("dag", 20)
    assert many[:5] == few
    assert list(problems("dag", TRAIN_SIZES, 6, start=9)) == many[9:15]
    assert many[14] == problem("dag", 13, 1)
    assert len({one.prompt for one in many}) == 20
    assert problem("dag", 13, 1, seed=1) != problem("dag", 13, 1)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("sizes", [TRAIN_SIZES, LONGER_SIZES])
def test_every_problem_is_what_it_says(task, sizes):
    sizes = (sizes[0], min(sizes[1], TASKS[task].max_size))
    for one in some(task, 13, sizes):
        assert set(one.prompt + one.response()) <= set(ALPHABET)
        assert len(one.steps) == one.size + 1
        assert all(k - 1 in step.reads for k, step in enumerate(one.steps) if k)
        assert all(list(s.reads) == sorted(set(s.reads)) for s in one.steps)
        assert one.check(one.response())
        assert one.first_wrong(one.response()) is None
        assert [one.response()[a:b] for a, b in one.spans] == [s.text for s in one.steps]
    assert len(ALPHABET) < 64
    assert len(set(ALPHABET)) == len(ALPHABET)


@pytest.mark.parametrize("task", TASKS)
def test_training_sizes_fit_in_360_tokens(task):
    for one in some(task, 2, (TRAIN_SIZES[1], TRAIN_SIZES[1])):
        assert len(one.prompt) + sum(one.lengths) + 1 <= 360


@pytest.mark.parametrize("task", LINES)
def test_lines_say_whom_they_read_and_what_it_is(task):
    for one in some(task):
        values = worked_out(one)
        own: dict[str, int] = {}
        is_read = {one.prompt[-1]}
        for k, step in enumerate(one.steps[:-1]):
            left, _, right, name, value = LINE.fullmatch(step.text).groups()
            assert int(value) == values[name]
            read = [x[0] for x in (left, right) if not x.isdigit()]
            assert all(int(x[1:]) == values[x[0]] for x in (left, right) if not x.isdigit())
            assert set(step.reads) == {own[x] for x in read} | ({k - 1} if k else set())
            is_read |= set(read)
            own[name] = k
        asked = one.prompt[-1]
        assert one.steps[-1] == Step(
            f"?{asked}{values[asked]}", tuple(sorted({own[asked], one.size - 1}))
        )
        for step in one.steps[:-1]:
            assert step.fact == (step.text[-2:] if step.text[-2] in is_read else "")


@pytest.mark.parametrize("task", LINES)
def test_the_solution_follows_the_prompt(task):
    """Line by line, each name that is read with its value."""
    for one in some(task):
        *lines, asked = one.prompt.split(";")
        for line, step in zip(lines, one.steps[:-1], strict=True):
            assert re.sub(r"([a-zA-Z])\d", r"\1", step.text) == line
        assert one.steps[-1].text[:-1] == asked


@pytest.mark.parametrize("sizes", [TRAIN_SIZES, LONGER_SIZES])
@pytest.mark.parametrize("task", ["program", "slots", "tree", "chain"])
def test_values_are_read_once(task, sizes):
    for one in some(task, 26, sizes):
        read = [x for left, _, right, _ in _lines(one) for x in (left, right) if x.isalpha()]
        assert sorted([*read, one.prompt[-1]]) == sorted(name for *_, name in _lines(one))


@pytest.mark.parametrize("task", LINES)
def test_a_wrong_value_that_is_read_spoils_the_answer(task):
    for one in some(task):
        reached = _leading_to_the_answer(one)
        assert {k for k in range(one.size) if _spoiled(one, k) != one.answer} == reached
        if task in ("tree", "chain"):
            assert reached == set(range(one.size))


def _spoiled(one: Problem, wrong: int) -> str:
    """The answer if a step's value were one more."""
    values: dict[str, int] = {}
    for k, (left, operator, right, name) in enumerate(_lines(one)):
        a, b = (int(x) if x.isdigit() else values[x] for x in (left, right))
        result = a + b if operator == "+" else a - b
        values[name] = (result + (k == wrong)) % 5
    return str(values[one.prompt[-1]])


def _leading_to_the_answer(one: Problem) -> set[int]:
    names = [s.text[-2] for s in one.steps[:-1]]
    reached = {names.index(one.prompt[-1])}
    for k in range(one.size - 1, -1, -1):
        if k in reached:
            reached |= {names.index(x) for x in one.steps[k].text[:-2] if x in names}
    return reached


def test_graphs_have_the_shapes_they_are_for():
    assert {max_live(one.reads) for one in some("chain")} == {2}
    assert max_live(problem("tree", 31, 0).reads) == 6  # a perfect tree of depth 4
    for task in (
        "program",
        "slots",
        "tree",
        "countdown",
    ):  # the last six steps are not what is needed
        for one in some(task, 13, (24, 24)):
            assert max_live(one.reads) <= 8
            in_turn = one.labelled(Labels("round-robin", 6))
            assert needed_kills(in_turn.registers, one.reads)
    dead = [sum(k not in {j for s in one.steps[k + 2 :] for j in s.reads} for k in range(one.size))
            for one in some("dag", 13, (20, 20))]  # fmt: skip
    assert min(dead) >= 4  # distractors, and what only the next step reads


@pytest.mark.parametrize("task", TASKS)
def test_no_problem_is_in_two_splits_under_any_names(task):
    size = max(TASKS[task].min_size, 5)
    found = {
        split: {_unnamed(one) for one in some(task, 60, (size, size), split)} for split in SPLITS
    }
    assert not found["train"] & found["valid"]
    assert not found["train"] & found["test"]
    assert not found["valid"] & found["test"]


def _unnamed(one: Problem) -> str:
    if one.task == "countdown":
        numbers, target = re.findall(r"\d\d", one.prompt)[:4], one.prompt[-2:]
        return f"{sorted(numbers)} {target}"
    order: dict[str, str] = {}
    return "".join(order.setdefault(c, f"<{len(order)}>") if c in NAMES else c for c in one.prompt)


@pytest.mark.parametrize("task", TASKS)
def test_every_size_can_be_made(task):
    for size in range(TASKS[task].min_size, TASKS[task].max_size + 1, 3):
        assert problem(task, size, 0).size == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tre", 5, 0), "unknown task 'tre'; did you mean 'tree'"),
        (("tree", 43, 0), "no problems of size 43; give 3 to 42"),
        (("program", 5, 0), "no problems of size 5; give 6 to 42"),
    ],
)
def test_problems_that_there_are_not(arguments, message):
    with pytest.raises((InvalidInput, UnknownName), match=message):
        problem(*arguments)


def test_sizes_are_a_number_or_a_range():
    assert parse_sizes("7") == (7, 7)
    assert parse_sizes("12-24") == (12, 24)
    for text in ("", "-", "x", "3-", "-3", "1e3", "٣"):
        with pytest.raises(InvalidInput, match="no number of steps"):
            parse_sizes(text)
    with pytest.raises(InvalidInput, match="smaller one first"):
        parse_sizes("24-12")


# -- how answers are checked -----------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_registers_and_white_space_around_change_no_verdict(task):
    one = problem(task, 12, 3)
    text = one.response([k % 8 for k in range(13)])
    assert text.count("<reg_") == 13
    assert one.check(f" {text}\n")
    assert one.first_wrong(text) is None
    with pytest.raises(InvalidInput, match="3 registers for 13 steps"):
        one.response([0, 1, 2])


def test_a_value_is_right_by_its_end_and_a_trace_by_its_first_fault():
    one = problem("program", 12, 0)
    text, answer = one.response(), int(one.answer)
    assert one.check(text[-3:])
    assert one.first_wrong(text[-3:]) == 0
    wrong = f"{text[:-1]}{(answer + 1) % 5}"
    assert not one.check(wrong)
    assert one.first_wrong(wrong) == 12
    at = one.spans[4][1] - 1  # the value of step 4
    spoiled = text[:at] + str((int(text[at]) + 1) % 5) + text[at + 1 :]
    assert one.check(spoiled)
    assert one.first_wrong(spoiled) == 4
    assert one.first_wrong(text + text) == 13
    assert not one.check(text + "a")
    assert one.first_wrong(text[: one.spans[4][1] - 1]) == 4
    assert not one.check("")
    other = next(n for n in NAMES if n != text[-2])
    assert not one.check(f"?{other}{answer}")


def test_any_way_to_the_target_is_right_and_no_claim_is_believed():
    one = Problem("x", "countdown", 3, "a02b03c04d05?14", (Step("?a", ()),), "x")
    assert one.check("e=a+b:05f=e+c:09g=f+d:14?g")
    assert one.check("e=a*b:99f=e+c:77e=f-d:00e=a+b:05f=c+d:09z=e+f:00?z")
    assert not one.check("e=a+b:05f=e+c:09g=f+d:14?f")
    assert not one.check("e=d+d:10f=e+c:14?f")  # uses a number twice, others never
    assert not one.check("e=a*d:10f=e+c:14?f")  # leaves one out
    assert not one.check("e=a+b:05f=e+c:09g=f+d:14")
    assert not one.check("g=f+e:14e=a+b:05f=c+d:09?g")  # read before it is there


def test_a_number_used_twice_is_no_number_however_often_it_is_written():
    """Each line would square the last one: 2 to the power of 2 to the power of 60."""
    one = problem("countdown", 12, 0)
    names = [one.prompt[0], *[name for name in NAMES if name not in one.prompt][:2] * 30]
    lines = [f"{new}={old}*{old}:01" for old, new in itertools.pairwise(names)]
    assert not one.check("".join(lines) + f"?{names[-1]}")
    assert one.check("".join(lines) + one.response())


def test_the_search_goes_depth_first_over_what_is_left():
    tries = list(search((2, 3, 4, 5)))
    assert [(t.left, t.operator, t.right, t.value, t.path, t.before) for t in tries[:5]] == [
        (0, "+", 1, 5, (), None),
        (2, "+", 3, 9, (0,), None),
        (4, "+", 5, 14, (0, 1), None),
        (5, "-", 4, 4, (0, 1), 2),
        (4, "*", 5, 45, (0, 1), 3),
    ]
    assert all(1 <= t.value <= 99 for t in tries)
    one = problem("countdown", 20, 0)
    last = one.steps[-2]
    assert one.answer == last.text[0] == one.response()[-1]
    assert last.text.endswith(f":{one.prompt[-2:]}")


def test_tasks_of_eval_score_answers_and_traces():
    for name in TASKS:
        task = get_task(name)
        found = load_prompts(task, Source(limit=4, size="6-8"))
        assert [item.gold.size for item in found.items] == [6, 7, 8, 6]
        assert {item.gold.id.split("-")[2] for item in found.items} == {"test"}
        item = found.items[0]
        good = task.score(item, item.gold.response())
        assert (good.value, good.shares) == (1.0, {"trace_right": 1.0, "steps_right": 1.0})
        end = item.gold.spans[2][1]
        bad = task.score(item, item.gold.response()[:end])
        assert (bad.value, bad.shares) == (0.0, {"trace_right": 0.0, "steps_right": 3 / 7})
        assert bad.details == {"first_wrong": 3, "size": 6}
    train = load_prompts(get_task("tree"), Source(limit=2, split="train", seed=5))
    assert [i.gold for i in train.items] == list(problems("tree", TRAIN_SIZES, 2, seed=5))
    with pytest.raises(InvalidInput, match="makes its own prompts"):
        load_prompts(get_task("tree"), Source(paths=(Path("x"),)))
    for name, paths in (("multipart", ()), ("gsm8k", (Path("x"),))):
        with pytest.raises(InvalidInput, match=f"task {name} has no sizes; leave out --size 8"):
            load_prompts(get_task(name), Source(paths=paths, size="8"))


# -- the page -----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


def test_the_page_shows_examples_and_figures_as_they_are():
    page = (ROOT / "docs" / "problems.md").read_text(encoding="utf-8")
    for task in TASKS:
        one = problem(task, 8, 0)
        assert f"| `{task}` | `{one.prompt}` | `{one.labelled(Labels()).annotated}` |\n" in page
    script = runpy.run_path(str(ROOT / "benchmarks" / "problems" / "live.py"))
    rows = json.loads(script["RESULT"].read_text(encoding="utf-8"))["rows"]
    assert script["table"](rows) in page
    tree = next(row for row in rows if row["task"] == "tree")
    assert script["measured"]("tree", TRAIN_SIZES, tree["problems"]) == tree


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments):
    code = main(["data", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else {}, captured.err


def make(capsys, *arguments, task="tree", num=6, out="rows.jsonl"):
    return run(
        capsys, "problems", "--task", task, "--num", str(num), "--out", out, *arguments
    )  # fmt: skip


@pytest.mark.parametrize("policy", LABELS)
def test_rows_of_each_policy(place, capsys, policy):
    code, result, _ = make(capsys, "--labels", policy, "--registers", "4", "--size", "12-14")
    assert (code, result["rows"], result["dropped"]) == (0, 6, {})
    rows = read_rows(place / "rows.jsonl", Annotated)
    for row, one in zip(rows, problems("tree", (12, 14), 6), strict=True):
        assert (row.prompt, row.prompt_id) == (one.prompt, prompt_id(one.prompt))
        assert re.sub("<reg_[0-3]>", "", row.annotated) == row.response
        assert one.check(row.response)
        assert ("<reg_" in row.annotated) == (policy != "none")
    assert (result["mean_live"] is None) == (policy == "none")
    assert bool(result["needed_kills"]) == (policy in ("round-robin", "random"))
    assert bool(result["merged"]) == (policy in ("liveness", "stack"))


def test_the_same_command_makes_the_same_file_and_another_does_not_replace_it(place, capsys):
    assert make(capsys, "--slack", "4")[0] == 0
    data = (place / "rows.jsonl").read_bytes()
    assert make(capsys, "--slack", "4")[0] == 0
    assert (place / "rows.jsonl").read_bytes() == data
    code, _, error = make(capsys)
    assert code == 2
    assert "holds something else" in error
    assert (place / "rows.jsonl").read_bytes() == data
    assert sorted(path.name for path in place.iterdir()) == ["rows.jsonl"]


def test_what_does_not_fit_is_kept_with_its_reason(place, capsys):
    code, result, _ = make(capsys, "--registers", "3", "--size", "24", task="program")
    assert code == 3
    assert result["dropped"] == {"too-few-registers": 6 - result["rows"]}
    rejects = read_rows(place / "rows.rejects.jsonl", Reject)
    assert len(rejects) == 6 - result["rows"]
    assert "5 steps are needed at once, more than 3 registers hold" in rejects[0].reasons[0]


def test_registers_from_graphs_are_those_of_the_problems(place, capsys):
    from data_kit import save_tokenizer

    save_tokenizer(place / "tok")
    assert make(capsys, "--registers", "8", out="labelled.jsonl")[0] == 0
    assert make(capsys, "--labels", "none", "--graphs", "graphs.jsonl")[0] == 0
    graphs = read_rows(place / "graphs.jsonl", Graph)
    assert [g.key for g in graphs] == [r.key for r in read_rows(place / "rows.jsonl", Annotated)]
    (place / "graphs.jsonl").write_bytes(
        b"".join((place / "graphs.jsonl").read_bytes().splitlines(keepends=True)[1:])
    )
    code, result, _ = run(
        capsys, "registers", "rows.jsonl", "--graphs", "graphs.jsonl", "--registers", "8",
        "--out", "found.jsonl", "--tokenizer", "tok",
    )  # fmt: skip
    assert (code, result["rows"], result["dropped"]) == (3, 5, {"no-graph": 1})
    _, stats, _ = run(capsys, "stats", "found.jsonl", "--dialect", "tip", "--tokenizer", "tok")
    assert stats["live_tokens"]["mean"] == pytest.approx(result["mean_live"])
    assert stats["live_tokens"]["dense"] == pytest.approx(result["dense_live"])
    found = read_json_lines(place / "found.jsonl")
    wanted = read_json_lines(place / "labelled.jsonl")[1:]
    assert [row["annotated"] for row in found] == [row["annotated"] for row in wanted]
    assert [row["prompt"] for row in found] == [row["prompt"] for row in wanted]
    code, result, _ = run(
        capsys, "check", "found.jsonl", "--dialect", "tip", "--tokenizer", "tok"
    )  # fmt: skip
    assert (code, result["ok"]) == (0, 5)
    code, result, _ = run(
        capsys, "check", "found.jsonl", "--dialect", "tip", "--tokenizer", "tok",
        "--registers", "2",
    )  # fmt: skip
    assert (code, result["reasons"]) == (3, {"too-few-registers": 5})
    assert "is written, and there are 2" in result["faults"][0]["reasons"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num", "0"), "--num must be at least 1, got 0"),
        (("--start", "-1"), "--start must be at least 0, got -1"),
        (("--size", "2"), "task tree has no problems of size 2; give 3 to 42"),
        (("--split", "dev"), "unknown split 'dev'"),
        (("--labels", "live"), "unknown labels 'live'"),
        (("--out", "nowhere/rows.jsonl"), "there is no folder"),
    ],
)
def test_what_cannot_be_made_is_told(place, capsys, arguments, message):
    code, _, error = make(capsys, *arguments)
    assert code == 2
    assert message in error
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("graphs", ["rows.jsonl", "./rows.jsonl", "rows.rejects.jsonl"])
def test_graphs_have_a_file_of_their_own(place, capsys, graphs):
    code, _, error = make(capsys, "--graphs", graphs)
    assert (code, list(place.iterdir())) == (2, [])
    assert "is one of rows.jsonl and rows.rejects.jsonl, which are written" in error


@pytest.mark.parametrize("read", ["found.jsonl", "found.rejects.jsonl"])
def test_what_is_read_is_not_written_over(place, capsys, read):
    assert make(capsys, "--labels", "none", "--graphs", "graphs.jsonl")[0] == 0
    for name, as_files in (("rows.jsonl", True), ("graphs.jsonl", False)):
        data = (place / name).read_bytes()
        (place / read).write_bytes(data)
        files, graphs = (read, "graphs.jsonl") if as_files else ("rows.jsonl", read)
        code, _, error = run(capsys, "registers", files, "--graphs", graphs, "--out", "found.jsonl")
        assert code == 2
        assert "which are written" in error
        assert (place / read).read_bytes() == data


def test_problems_need_no_torch():
    code = "import sys, stretto.problems.rows, stretto.eval.task_problems"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
