"""`stretto eval`: runs that go on where they were, comparisons that are refused, files written."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_kernels import kernels_for
from tiny_lms import tiny_lm

from stretto import LM
from stretto.cli import eval_run, main
from stretto.data.rows import read_rows
from stretto.errors import StrettoError
from stretto.eval import runner
from stretto.eval.answers import Contestant
from stretto.eval.folder import first_difference, load_run
from stretto.eval.identity import told_name
from stretto.eval.judges import Comparison, Judge, Measure, Question, Verdict
from stretto.eval.rows import EvalRow
from stretto.eval.summary import summary_of
from stretto.models.fingerprint import fingerprint

NUM_PROMPTS = 5
MODELS: dict[str, LM] = {}


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names stand for tiny models; `pasta` has the dialect."""

    def load(_: Any, name: str) -> LM:
        if name not in MODELS:
            MODELS[name] = tiny_lm(name) if name == "pasta" else tiny_lm()
        return MODELS[name]

    monkeypatch.setattr(eval_run.Loader, "load", load)
    monkeypatch.setattr("stretto.eval.identity.folder_of", lambda name: None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"instruction": f"Tell me of {n}", "answer": f"#### {n}"} for n in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[0]]))
    return path


def run(out: Path, prompts: Path | None, *more: str, task: str = "instruct") -> int:
    arguments = ["eval", "run", "--task", task, "--out", str(out), "--model", "plain"]
    arguments += [] if prompts is None else ["--prompts", str(prompts)]
    return main([*arguments, "--max-tokens", "6", *more])


def run_arms(out: Path, prompts: Path, arms: Sequence[str], *more: str) -> int:
    arguments = ["eval", "run", "--task", "gsm8k", "--out", str(out), "--prompts", str(prompts)]
    named = [part for arm in arms for part in ("--arm", arm)]
    return main([*arguments, "--max-tokens", "6", *named, *more])


def rows_of(out: Path) -> list[EvalRow]:
    return sorted(read_rows(out / "rows.jsonl", EvalRow), key=lambda row: row.number)


def summary_less_times(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    del summary["throughput"]
    return summary


def last_line(capfd: pytest.CaptureFixture[str]) -> str:
    """The one error line of a command that printed nothing else."""
    captured = capfd.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


# -- run -------------------------------------------------------------------------------------------


def test_prompts_that_share_passes_are_kept_in_order(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = runner.answer_together

    def backwards(*given: Any) -> Iterator[Any]:
        return reversed(list(together(*given)))

    monkeypatch.setattr(runner, "answer_together", backwards)
    assert run(tmp_path / "run", prompts, "--pairs", "0") == 0
    numbers = [row.number for row in read_rows(tmp_path / "run" / "rows.jsonl", EvalRow)]
    assert numbers == [1, 2, 3, 4, 5]


def test_a_run_leaves_a_whole_folder(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(out, prompts, "--json") == 0
    captured = capfd.readouterr()
    summary = json.loads(captured.out)
    assert "left out by repetition: 1" in captured.err
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["counts"]["prompts"] == NUM_PROMPTS
    assert summary["speed"]["theoretical"]["geometric_mean"] == 1.0
    assert set(summary["definitions"]) >= {"realized", "theoretical", "parallelism", "accuracy"}
    with (out / "prompts.csv").open() as file:
        assert [row["number"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5"]
    (environment,) = json.loads((out / "environment.json").read_text())
    assert environment["command"].split()[0] == "stretto"
    assert environment["machine"]["versions"]["torch"]
    config = json.loads((out / "config.json").read_text())
    assert config["baseline"]["method"] == "sequential"
    assert str(tmp_path) not in (out / "config.json").read_text()
    assert rows_of(out)[0].prompt == "Tell me of 0"


def test_no_prompts_leaves_their_text_out_of_every_file(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "run"
    assert run(out, prompts, "--no-prompts") == 0
    for path in out.iterdir():
        if path.suffix in (".jsonl", ".json", ".csv"):
            assert "Tell me of" not in path.read_text()


def test_the_same_command_goes_on_and_another_one_is_refused(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    assert run(out, prompts, "--pairs", "0") == 0
    whole = rows_of(out)
    path = out / "rows.jsonl"
    path.write_bytes(
        b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + b'{"prompt_id": "torn'
    )
    assert run(out, prompts, "--pairs", "0") == 0
    assert [row.model_copy(update={"process": 0}) for row in rows_of(out)] == whole
    assert [row.process for row in rows_of(out)] == [0, 0, 1, 1, 1]
    monkeypatch.setattr(Contestant, "submit", None)  # a finished run decodes nothing
    assert run(out, prompts, "--pairs", "0") == 0
    for changed, named in (
        (["--seed", "1"], "sampling.seed is 0 there and 1 here"),
        (["--limit", "3"], "task.num_prompts is 5 there and 3 here"),
        (["--temperature", "0.5"], "sampling.temperature is 0.0 there and 0.5 here"),
        (["--repetition-penalty", "2"], "sampling.repetition_penalty is 1.0 there and 2.0 here"),
        (["--model", "pasta"], 'ours.model is "plain" there and "pasta" here'),
    ):
        capfd.readouterr()
        assert run(out, prompts, "--pairs", "0", *changed) == 2
        assert named in last_line(capfd)


def test_a_failed_prompt_is_kept_and_the_status_is_3(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    right = Contestant.submit

    def submit(self: Contestant, prompt: str, *rest: Any) -> Any:
        if prompt == "Tell me of 2":
            raise StrettoError("this one fails")
        return right(self, prompt, *rest)

    monkeypatch.setattr(Contestant, "submit", submit)
    out = tmp_path / "run"
    assert run(out, prompts, "--pairs", "0", "--json") == 3
    summary = json.loads(capfd.readouterr().out)
    assert summary["counts"]["failures"] == 1
    assert len(rows_of(out)) == NUM_PROMPTS
    assert run(out, prompts, "--pairs", "0") == 3


def test_tasks_with_right_answers_have_an_accuracy(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gsm8k"
    assert run(out, prompts, "--pairs", "0", "--json", task="gsm8k") == 0
    summary = json.loads(capfd.readouterr().out)
    assert 0 <= summary["quality"]["accuracy"]["value"] <= 100
    assert summary["quality"]["accuracy"] == summary["quality"]["baseline_accuracy"]
    out = tmp_path / "multipart"
    arguments = ["--pairs", "0", "--limit", "2", "--baseline", "none", "--json"]
    assert run(out, None, *arguments, "--model", "pasta", "--without", "sync", "--no-joins",
               task="multipart") == 0  # fmt: skip
    summary = json.loads(capfd.readouterr().out)
    assert set(summary["task_shares"]["ours"]) == {"parts_right", "sums_own_results"}
    assert summary["speed"]["theoretical"]["geometric_mean"] is None
    config = json.loads((out / "config.json").read_text())
    assert config["baseline"] is None
    assert (config["ours"]["without"], config["ours"]["joins"]) == (["sync"], False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--task", "instrukt"], "instruct"),
        (["--limit", "0"], "--limit"),
        (["--pairs", "-1"], "--pairs"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--method", "pastaa"], "pasta"),
        (["--engine", "hff"], "hf"),
        (["--dtype", "float31"], "float32"),
        (["--judge", "lm"], "llm"),
        (["--judge", "exact", "--baseline", "none"], "--baseline"),
        (["--prompts", "no-such-file"], "no-such-file"),
        (["--without", "sync"], "no control tokens"),
        (["--model", "pasta", "--method", "dense", "--no-joins"], "'dense' writes no dialect"),
        (["--task", "multipart"], "--prompts"),
        (["--split", "90-80"], "LOW-HIGH"),
        (["--prompt-field", "text"], "text"),
        (["--warm", "never"], "every"),
        (["--until", "0"], "--until"),
        (["--arm", "a=plain"], "leave out --model"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], named: str, tmp_path: Path, prompts: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    assert run(out, prompts, "--pairs", "0", *arguments) == 2
    assert named in last_line(capfd)
    assert not (out / "rows.jsonl").exists()


def test_a_folder_that_cannot_be_read_is_refused(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run(out, prompts, "--pairs", "0")
    for name, text, named in (
        ("config.json", "{", "config.json"),
        ("rows.jsonl", '{"prompt_id": 3}\n', "rows.jsonl:1"),
        ("rows.jsonl", "[]\n", "rows.jsonl:1"),
    ):
        before = (out / name).read_bytes()
        (out / name).write_text(text)
        capfd.readouterr()
        assert run(out, prompts, "--pairs", "0") == 2
        assert named in last_line(capfd)
        (out / name).write_bytes(before)
    (out / "config.json").unlink()
    assert run(out, prompts, "--pairs", "0") == 2
    assert "name another --out" in last_line(capfd)


# -- several arms ----------------------------------------------------------------------------------

ARMS = ("parallel=pasta", "blind=pasta:sequential", "sot=plain:sot")


def test_arms_leave_the_runs_that_they_would_leave_alone(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    untimed = ("--pairs", "0", "--baseline", "plain", "--json")
    assert run_arms(out, prompts, ARMS, *untimed) == 0
    table = json.loads(capfd.readouterr().out)
    assert [row["run"] for row in table["runs"]] == ["parallel", "blind", "sot"]
    for arm in ARMS:
        name, _, side = arm.partition("=")
        model, _, method = side.partition(":")
        alone = tmp_path / "alone" / name
        asked = ("--model", model, "--method", method or "auto", *untimed)
        assert run(alone, prompts, *asked, task="gsm8k") == 0
        assert {p.name for p in (out / name).iterdir()} == {p.name for p in alone.iterdir()}
        for file in ("config.json", "prompts.csv"):
            assert (out / name / file).read_text() == (alone / file).read_text()
        assert summary_less_times(out / name) == summary_less_times(alone)
        assert rows_of(out / name) == rows_of(alone)
    capfd.readouterr()
    runs = [str(out / name) for name in ("parallel", "sot")]
    assert main(["eval", "compare", *runs, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["runs"][1] == table["runs"][2]


def test_a_model_of_several_arms_is_loaded_once(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(_: Any, name: str) -> LM:
        loaded.append(name)
        return tiny_lm(name) if name == "pasta" else tiny_lm()

    monkeypatch.setattr(eval_run.Loader, "load", load)
    assert run_arms(tmp_path / "runs", prompts, ARMS, "--baseline", "plain", "--limit", "1") == 0
    assert sorted(loaded) == ["pasta", "plain"]


def test_all_arms_of_a_prompt_have_one_time_of_the_baseline(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "runs"
    assert run_arms(out, prompts, ARMS, "--baseline", "plain", "--until", "3") == 0
    assert run_arms(out, prompts, [*ARMS, "more=plain"], "--baseline", "plain") == 0
    old = [rows_of(out / name) for name in ("parallel", "blind", "sot")]
    for rows in zip(*old, strict=True):
        (times,) = {tuple(row.baseline.decode_s) for row in rows if row.baseline}
        assert len(times) == 1
        assert times[0] > 0
    assert [row.process for row in old[0]] == [0, 0, 0, 1, 1]
    new = rows_of(out / "more")  # never held against what another process timed
    assert [row.process for row in new] == [0] * 5
    times = [[r.baseline and r.baseline.decode_s for r in rows] for rows in (old[0], new)]
    assert [a == b for a, b in zip(*times, strict=True)] == [False] * 3 + [True] * 2


def test_until_ends_early_and_the_same_command_goes_on(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    for until, done in (("2", 2), ("2", 2), ("4", 4)):
        assert run(out, prompts, "--until", until, "--json") == 0
        assert json.loads(capfd.readouterr().out) == {"prompts": NUM_PROMPTS, "done": done}
        assert [row.number for row in rows_of(out)] == list(range(1, done + 1))
    assert not (out / "summary.json").exists()
    assert len(json.loads((out / "environment.json").read_text())) == 2
    assert run(out, prompts, "--json") == 0
    assert json.loads(capfd.readouterr().out)["counts"]["prompts"] == NUM_PROMPTS
    assert [row.process for row in rows_of(out)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("arms", "named"),
    [
        ("pasta", "NAME=MODEL"),
        ("=pasta", "NAME=MODEL"),
        ("a=", "NAME=MODEL"),
        ("a/b=pasta", "a folder's"),
        ("..=pasta", "a folder's"),
        ("a=pasta a=plain --baseline plain", "two arms are called a"),
        ("a=pasta b=plain", "--baseline"),
        ("a=pasta:sott", "sot"),
        ("a=plain:pasta", "sequential"),
        ("a=pasta --no-joins", "--no-joins"),
        ("a=pasta --without sync", "--without"),
        ("a=pasta --method sot", "--method"),
    ],
)
def test_arms_that_make_no_sense_are_refused(
    arms: str, named: str, tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names, dashes, more = arms.partition(" --")
    options = f"--{more}".split() if dashes else []
    assert run_arms(tmp_path / "runs", prompts, names.split(), *options) == 2
    assert named in last_line(capfd)


def test_runs_that_were_warmed_otherwise_are_not_compared(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = {name: tmp_path / name for name in ("first", "every", "untimed")}
    for name, out in folders.items():
        more = ("--pairs", "0") if name == "untimed" else ("--warm", name)
        assert run(out, prompts, *more) == 0
    assert run(folders["first"], prompts, "--warm", "every") == 2
    assert 'warm is "first" there and "every" here' in capfd.readouterr().err
    compare = ["eval", "compare"]
    assert main([*compare, str(folders["first"]), str(folders["every"])]) == 2
    assert 'warm is "first" in first and "every" in every' in last_line(capfd)
    assert main([*compare, str(folders["every"]), str(folders["untimed"])]) == 0
    config = json.loads((folders["first"] / "config.json").read_text())
    del config["warm"]  # of before there was a choice
    (folders["first"] / "config.json").write_text(json.dumps(config))
    assert main([*compare, str(folders["first"]), str(folders["every"])]) == 0


# -- judges ----------------------------------------------------------------------------------------


class LongerIsBetter:
    """A judge for tests, sure of itself by 0.5; silent about the prompts named."""

    def __init__(self, identity: str = "llm:a-judge;{}", silent: str = "nothing") -> None:
        self.identity = identity
        self.silent = silent
        self.asked: list[Comparison] = []

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure]]:
        raise NotImplementedError

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        raise NotImplementedError

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        self.asked += comparisons
        return [
            None
            if c.prompt == self.silent
            else Verdict.of(0.5 if len(c.a) > len(c.b) else -0.5, {})
            for c in comparisons
        ]

    def close(self) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> LongerIsBetter:
    made = LongerIsBetter()
    judge: Judge = made
    monkeypatch.setattr("stretto.eval.judges.open_judge", lambda settings: judge)
    return made


def shorten(out: Path, side: str, numbers: Sequence[int]) -> None:
    """Cuts answers of a finished run, so that sides differ."""
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        if row["number"] in numbers:
            row[side]["text"] = row[side]["text"][:1]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_verdicts_become_win_rates(
    tmp_path: Path, prompts: Path, judge: LongerIsBetter, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run(out, prompts, "--pairs", "0")
    shorten(out, "baseline", [1, 2])
    shorten(out, "ours", [3])
    judge.silent = "Tell me of 3"
    shorten(out, "ours", [4])
    capfd.readouterr()
    assert main(["eval", "judge", str(out), "--judge", "llm:a-judge", "--json"]) == 3
    summary = json.loads(capfd.readouterr().out)
    assert len(judge.asked) == 4
    assert summary["counts"]["unjudged"] == 1
    assert summary["judge"] == "llm:a-judge;{}"
    assert summary["quality"]["win_rate"]["value"] == pytest.approx(
        100 * (0.75 * 2 + 0.25 + 0.5) / 4
    )
    assert 0 < summary["quality"]["lc_win_rate"]["value"] < 100
    assert summary == json.loads((out / "summary.json").read_text())


def test_a_model_against_itself_has_50_and_no_judge_is_asked(
    tmp_path: Path, prompts: Path, judge: LongerIsBetter, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(out, prompts, "--pairs", "0", "--judge", "llm:a-judge", "--json") == 0
    quality = json.loads(capfd.readouterr().out)["quality"]
    assert judge.asked == []
    assert quality["win_rate"] == quality["lc_win_rate"] == {"value": 50, "low": 50, "high": 50}


def test_every_arm_is_judged(
    tmp_path: Path, prompts: Path, judge: LongerIsBetter, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ("--baseline", "plain", "--pairs", "0", "--judge", "llm:a-judge", "--json")
    assert run_arms(tmp_path / "runs", prompts, ARMS, *more) == 0
    table = json.loads(capfd.readouterr().out)
    assert table["judge"] == "llm:a-judge;{}"
    assert all(row["win_rate"] is not None for row in table["runs"])
    assert (tmp_path / "runs" / "sot" / "verdicts.llm.jsonl").exists()


def test_the_judge_that_scored_may_not_report(
    tmp_path: Path, prompts: Path, judge: LongerIsBetter, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "preference.json").write_text('{"scored_by": ["llm:a-judge;{\\"n\\": 1}"]}')
    monkeypatch.setattr("stretto.eval.identity.folder_of", lambda name: trained)
    out = tmp_path / "run"
    assert run(out, prompts, "--pairs", "0") == 0
    capfd.readouterr()
    assert main(["eval", "judge", str(out), "--judge", "llm:a-judge"]) == 2
    assert "scored the answers this model was trained on" in last_line(capfd)
    assert judge.asked == []
    at_once = tmp_path / "at-once"
    assert run(at_once, prompts, "--pairs", "0", "--judge", "llm:a-judge") == 2
    assert "scored the answers this model was trained on" in last_line(capfd)
    assert not at_once.joinpath("rows.jsonl").exists()
    judge.identity = "llm:another-judge;{}"
    assert main(["eval", "judge", str(out), "--judge", "llm:another-judge"]) == 0


def test_prompts_that_were_not_kept_come_from_their_files(
    tmp_path: Path, prompts: Path, judge: LongerIsBetter, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run(out, prompts, "--pairs", "0", "--no-prompts")
    shorten(out, "ours", [1])
    command = ["eval", "judge", str(out), "--judge", "llm:a-judge"]
    capfd.readouterr()
    assert main(command) == 2
    assert "--prompts" in last_line(capfd)
    other = tmp_path / "other.jsonl"
    other.write_text('{"instruction": "Something else"}\n')
    assert main([*command, "--prompts", str(other)]) == 2
    assert "not the prompts" in last_line(capfd)
    assert main([*command, "--prompts", str(prompts)]) == 0
    assert judge.asked[0].prompt == "Tell me of 0"


def test_a_task_judges_what_it_can_check(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(out, prompts, "--pairs", "0", "--judge", "exact", task="gsm8k") == 0
    assert load_run(out).verdicts is not None
    other = tmp_path / "other"
    run(other, prompts, "--pairs", "0")
    capfd.readouterr()
    assert main(["eval", "judge", str(other), "--judge", "exact"]) == 2
    assert "--expected" in last_line(capfd)


# -- compare, plot, export -------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]) -> tuple[Path, Path]:
    a, b = tmp_path / "a", tmp_path / "b"
    for out, method in ((a, "sequential"), (b, "pasta")):
        assert run(out, prompts, "--model", "pasta", "--method", method, task="gsm8k") == 0
    capfd.readouterr()
    return a, b


def test_runs_side_by_side(
    two: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = two
    out = tmp_path / "compared"
    assert main(["eval", "compare", str(a), str(b), "--json", "--out", str(out)]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [row["run"] for row in result["runs"]] == ["a", "b"]
    assert result["runs"][0]["theoretical"] == 1.0
    assert result["runs"][0]["accuracy"] == summary_of(load_run(a))["quality"]["accuracy"]["value"]
    paired = {line["figure"]: line for line in result["paired"]}
    ratio = result["runs"][1]["theoretical"] / result["runs"][0]["theoretical"]
    assert paired["theoretical"]["value"] == pytest.approx(ratio)
    assert paired["theoretical"]["low"] <= ratio <= paired["theoretical"]["high"]
    assert paired["accuracy"]["kind"] == "difference"
    assert json.loads((out / "compare.json").read_text()) == result
    assert {p.name for p in out.iterdir()} == {"compare.json", "runs.csv", "paired.csv"}
    assert main(["eval", "compare", str(a), str(b)]) == 0
    assert "paired with a" in capfd.readouterr().out


def test_threads_that_say_the_same_are_told_a_run(
    two: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = two
    rows = [json.loads(line) for line in (b / "rows.jsonl").read_text().splitlines()]
    (main_thread,) = rows[0]["ours"]["threads"]
    rows[0]["ours"]["threads"] += [main_thread | {"id": f"main.{k}"} for k in (1, 2, 3, 4)]
    rows[0]["ours"]["redundant"] = 3
    (b / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["eval", "compare", str(a), str(b), "--json"]) == 0
    names = ("threads", "redundant", "redundant_threads")
    found = [[row[n] for n in names] for row in json.loads(capfd.readouterr().out)["runs"]]
    assert found == [[1.0, None, 0.0], [1 + 4 / 5, 3 / 4, 3 / 5]]
    assert main(["eval", "compare", str(a), str(b)]) == 0
    assert "redundant_threads" in capfd.readouterr().out


def test_a_repetition_penalty_reaches_both_sides(tmp_path: Path, prompts: Path) -> None:
    for name, penalty in (("a", "1"), ("b", "1000")):
        assert run(tmp_path / name, prompts, "--pairs", "0", "--repetition-penalty", penalty) == 0
    plain, penalised = rows_of(tmp_path / "a"), rows_of(tmp_path / "b")
    assert any(a.ours.text != b.ours.text for a, b in zip(plain, penalised, strict=True))
    pairs = zip(plain, penalised, strict=True)
    assert any(a.baseline.text != b.baseline.text for a, b in pairs if a.baseline and b.baseline)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--seed", "3"], "sampling.seed is 0 in a and 3 in c"),
        (["--limit", "3"], "task.num_prompts is 5 in a and 3 in c"),
        (["--max-tokens", "7"], "sampling.max_tokens is 6 in a and 7 in c"),
        (["--baseline", "plain"], 'baseline.model is "pasta" in a and "plain" in c'),
        (["--baseline", "none"], "baseline is"),
    ],
)
def test_runs_measured_otherwise_are_not_compared(
    changed: list[str], named: str, two: tuple[Path, Path], prompts: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tmp_path = two[0].parent
    c = tmp_path / "c"
    run(c, prompts, "--model", "pasta", *changed, task="gsm8k")
    for verb in (["compare"], ["plot", "--out", str(tmp_path / "plots")]):
        capfd.readouterr()
        assert main(["eval", verb[0], str(two[0]), str(c), *verb[1:]]) == 2
        assert named in last_line(capfd)


def test_judged_runs_are_compared_if_one_judge_judged_them(
    two: tuple[Path, Path], judge: LongerIsBetter, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def judge_by(out: Path, identity: str) -> None:
        judge.identity = identity
        assert main(["eval", "judge", str(out), "--judge", identity.partition(";")[0]]) == 0
        capfd.readouterr()

    compare = ["eval", "compare", *map(str, two), "--json"]
    judge_by(two[0], "llm:a-judge;{}")
    assert main(compare) == 2
    assert 'judge is "llm:a-judge;{}" in a and null in b' in last_line(capfd)
    judge_by(two[1], "llm:a-judge;{}")
    assert main(compare) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["judge"] == "llm:a-judge;{}"
    assert result["runs"][0]["lc_win_rate"] == pytest.approx(50)
    assert (
        result["runs"][1]["win_rate"]
        == summary_of(load_run(two[1]))["quality"]["win_rate"]["value"]
    )
    assert {line["figure"] for line in result["paired"]} >= {"win_rate", "accuracy", "realized"}
    plots = ["eval", "plot", *map(str, two), "--out", str(tmp_path / "plots")]
    assert main([*plots, "--quality", "lc_win_rate"]) == 0
    with (tmp_path / "plots" / "parallelism.csv").open() as file:
        assert next(csv.DictReader(file))["quality"] == "50.0"
    for out in two:
        judge_by(out, "likelihood:another;{}")
    assert main(compare) == 2
    assert "name one with --judge" in last_line(capfd)
    assert main([*compare, "--judge", "likelihood"]) == 0
    assert json.loads(capfd.readouterr().out)["judge"] == "likelihood:another;{}"


def test_other_prompts_of_the_same_number_are_refused(
    two: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other, c = tmp_path / "other.jsonl", tmp_path / "c"
    lines = [{"instruction": f"Speak of {n}", "answer": f"#### {n}"} for n in range(NUM_PROMPTS)]
    other.write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[0]]))
    run(c, other, "--model", "pasta", task="gsm8k")
    capfd.readouterr()
    assert main(["eval", "compare", str(two[0]), str(c)]) == 2
    assert "task.digest" in last_line(capfd)


def test_what_is_no_finished_run_is_refused(
    two: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = two
    path = b / "rows.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    for folders, named in (
        ([a, b], "3 of 5 prompts"), ([a, tmp_path], "no config.json"), ([a, a], "twice"),
    ):  # fmt: skip
        assert main(["eval", "compare", *map(str, folders)]) == 2
        assert named in last_line(capfd)


def test_plots_have_their_points_beside_them(
    two: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plots"
    assert main(["eval", "plot", *map(str, two), "--out", str(out), "--json"]) == 0
    names = ("realized", "theoretical", "parallelism", "live_generated")
    assert json.loads(capfd.readouterr().out) == [f"{n}.{e}" for n in names for e in ("png", "csv")]
    with (out / "theoretical.csv").open() as file:
        points = list(csv.DictReader(file))
    assert [p["run"] for p in points] == ["baseline", "a", "b"]
    assert points[0]["speed"] == "1.0"
    assert {p["on_front"] for p in points} <= {"True", "False"}
    assert (out / "theoretical.png").read_bytes().startswith(b"\x89PNG")
    assert main(["eval", "plot", *map(str, two), "--out", str(out), "--quality", "win_rate"]) == 2
    assert "judge" in last_line(capfd)


def test_the_front_is_what_no_other_run_beats() -> None:
    from stretto.eval.plots import points_of

    rows = [
        {"run": name, "realized": x, "realized_low": x, "realized_high": x,
         "accuracy": y, "accuracy_low": y, "accuracy_high": y}
        for name, x, y in (("fast", 2.0, 40.0), ("good", 1.2, 60.0), ("worse", 1.1, 55.0),
                           ("tied", 2.0, 40.0), ("untimed", None, 99.0))
    ]  # fmt: skip
    points = points_of(rows, "realized", "accuracy", 50.0)
    assert {p["run"]: p["on_front"] for p in points} == {
        "baseline": False, "fast": True, "good": True, "worse": False, "tied": True
    }  # fmt: skip


def test_export_for_alpaca_eval(
    tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "run", tmp_path / "outputs.json"
    run(out, prompts, "--pairs", "0", "--no-prompts")
    command = ["eval", "export", str(out), "--out", str(file), "--format", "alpaca_eval"]
    capfd.readouterr()
    assert main(command) == 2
    assert "--prompts" in last_line(capfd)
    assert main([*command, "--prompts", str(prompts), "--dataset", "helpful", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["outputs"] == NUM_PROMPTS
    entries = json.loads(file.read_text())
    assert [set(e) for e in entries] == [{"instruction", "output", "generator", "dataset"}] * 5
    assert [e["instruction"] for e in entries] == [f"Tell me of {n}" for n in range(5)]
    assert [e["output"] for e in entries] == [row.ours.text for row in rows_of(out) if row.ours]
    assert {e["generator"] for e in entries} == {"run"}
    assert main([*command, "--prompts", str(prompts), "--side", "baseline"]) == 0
    assert {e["generator"] for e in json.loads(file.read_text())} == {"plain"}
    assert main([*command, "--side", "theirs"]) == 2


def test_a_model_is_told_by_name_and_weights_and_not_by_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "sft" / "model"
    model.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert told_name("sft/model") == told_name(str(model)) == "sft/model"
    assert told_name("org/hub-name") == "org/hub-name"
    monkeypatch.chdir(model)
    assert told_name("../model") == "sft/model"
    marks = [fingerprint(model)]
    for name, data in (
        ("config.json", b"{}"), ("adapter_model.safetensors", b"a" * 5_000_000),
        ("adapter_model.safetensors", b"ab" * 2_500_000), ("stretto.json", b"{}"),
    ):  # fmt: skip
        (model / name).write_bytes(data)
        marks.append(fingerprint(model))
    (model / "training-notes.md").write_text("not part of the model")
    assert len(set(marks)) == 5
    assert fingerprint(model) == marks[-1]


def test_the_first_difference_is_named() -> None:
    one = {"a": 1, "b": {"c": [1], "d": None}}
    assert first_difference(one, json.loads(json.dumps(one))) is None
    assert first_difference(one, {"a": 1, "b": {"c": [2]}}) == "b.c is [1] there and [2] here"
    assert first_difference({"a": None}, {"a": None, "b": 2}) == "b is null there and 2 here"


# -- killed ----------------------------------------------------------------------------------------


def test_a_killed_run_gives_the_same_rows(tmp_path: Path) -> None:
    """kill -9 in the middle; the same command finishes the rest."""
    kernels_for("float32", skip=True)
    model = tiny_lm("pasta", head_dim=16).save(tmp_path / "model")
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def command(out: Path) -> list[str]:
        return [
            sys.executable, "-m", "stretto", "eval", "run", "--task", "multipart", "--limit", "24",
            "--model", str(model), "--engine", "fused", "--dtype", "float32", "--max-tokens", "40",
            "--temperature", "1", "--pairs", "0", "--threads", "1", "--out", str(out),
        ]  # fmt: skip

    rows = killed / "rows.jsonl"
    with subprocess.Popen(command(killed), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:  # fmt: skip
        while process.poll() is None and (not rows.exists() or rows.stat().st_size == 0):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    num_kept = rows.read_bytes().count(b"\n")
    assert 0 < num_kept < 24
    for out in (killed, whole):
        subprocess.run(command(out), check=True, capture_output=True)
    first = [row.model_copy(update={"process": 0}) for row in rows_of(killed)]
    assert first == rows_of(whole)
    assert len(json.loads((killed / "environment.json").read_text())) == 2
    summaries = [json.loads((out / "summary.json").read_text()) for out in (killed, whole)]
    other = {"run": "", "revisions": []}  # a checkout may change while tests run
    assert summaries[0] | other == summaries[1] | other
