"""`stretto bench e2e`: a method against sequential decoding, over prompts, on a tiny model."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from test_bench_peers import silent
from tiny_lms import tiny_lm

from stretto.bench import e2e
from stretto.bench.journal import Journal
from stretto.cli import main
from stretto.errors import InvalidInput, StrettoError
from stretto.params import SamplingParams


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("stretto.cli.bench_parts.Place.lm", lambda _: tiny_lm())
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\nthree\n", encoding="utf-8")
    return path


def fail_on(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto import comparison

    right = comparison.compare

    def compare(lm: Any, asked: str, *rest: Any, **options: Any) -> Any:
        if asked == prompt:
            raise StrettoError("this one fails")
        return right(lm, asked, *rest, **options)

    monkeypatch.setattr(comparison, "compare", compare)


def test_prompts_are_lines(prompts: Path, tmp_path: Path) -> None:
    assert e2e.read_prompts(prompts) == ["one", "two", "three"]
    assert e2e.read_prompts(prompts, 2) == ["one", "two"]
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    with pytest.raises(InvalidInput, match="has no prompt"):
        e2e.read_prompts(blank)
    with pytest.raises(InvalidInput, match="No such file"):
        e2e.read_prompts(tmp_path / "none.txt")


def test_a_failed_prompt_is_counted_and_in_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on("b", monkeypatch)
    told: list[str] = []
    rows = e2e.measure(
        tiny_lm(), ["a", "b", "c"], "sot", params=SamplingParams(max_tokens=8), num_pairs=1,
        journal=Journal(None, {}, silent, revision="abc"), report=told.append,
    )  # fmt: skip
    assert "this one fails" in told[1]
    summaries = [e2e.summary_of(row, "sot") for row in rows]
    assert [s["finish_reason"] for s in summaries] == ["length", "error", "length"]
    assert summaries[1]["realized"] is None
    mean = next(m for m in e2e.means_of(summaries, 0) if m["figure"] == "realized")
    assert (mean["group"], mean["prompts"], mean["left_out"]) == ("all", 2, 1)
    assert mean["low"] <= mean["geometric_mean"] <= mean["high"]
    product = summaries[0]["realized"] * summaries[2]["realized"]
    assert mean["geometric_mean"] == pytest.approx(product**0.5)


def test_groups_of_means() -> None:
    figures = {"steps_per_token": 2.0, "theoretical": 4.0, "realized": None}
    rows = [{"threads": n, **figures} for n in (0, 3, None)]
    means = {(m["group"], m["figure"]): m for m in e2e.means_of(rows, 0)}
    assert means["all", "theoretical"]["geometric_mean"] == pytest.approx(4)
    assert means["3 threads or more", "steps_per_token"]["prompts"] == 1
    assert means["all", "realized"]["geometric_mean"] is None
    assert means["all", "realized"]["left_out"] == 3


def test_counts_of_prompts_have_a_definition() -> None:
    found = [(3, 0.5), (4, 0.8), (3, None), (2, 0.1), (None, None)]
    rows = [
        {"threads": n, "steps_per_token": s, "finish_reason": "error" if n is None else "stop"}
        for n, s in found
    ]
    counts = e2e.counts_of(rows)
    assert counts == {
        "prompts": 5,
        "failures": 1,
        "with_3_threads_or_more": 3,
        "of_these_below_0.8_steps_per_token": 1,
    }
    assert {*counts} - {"prompts"} <= {*e2e.DEFINITIONS}


def test_sequential_decoding_is_not_compared_with_itself() -> None:
    assert e2e.check_method(tiny_lm(), "sot") == "sot"
    for method in ("auto", "sequential"):
        with pytest.raises(InvalidInput, match="--method"):
            e2e.check_method(tiny_lm(), method)


def test_e2e_command(
    prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    arguments = ["bench", "e2e", "--prompts", str(prompts), "--method", "sot", "--pairs", "1"]
    arguments += ["--max-tokens", "6", "--out", str(out)]
    assert main([*arguments, "--limit", "2", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [row["prompt"] for row in result["rows"]] == [1, 2]
    assert sorted(p.name for p in out.iterdir()) == [
        "means.csv", "plot.png", "rows.jsonl", "run.json", "summary.csv"
    ]  # fmt: skip
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert set(rows[0]) == {"prompt", "sha256", "sot", "sequential"}
    with (out / "means.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
    run = json.loads((out / "run.json").read_text())
    assert (run["benchmark"], run["prompts"], run["failures"]) == ("e2e", 2, 0)
    fail_on("two", monkeypatch)
    assert main(arguments) == 3
    captured = capfd.readouterr()
    assert "geometric_mean" in captured.out
    assert "this one fails" in captured.err
    assert json.loads((out / "run.json").read_text())["failures"] == 1


def test_a_killed_run_goes_on_from_its_prompts(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    lm, options = tiny_lm(), {"params": SamplingParams(max_tokens=4), "num_pairs": 1}
    first = e2e.measure(
        lm,
        ["one"],
        "sot",
        journal=Journal(out, {}, silent, revision="abc"),
        report=silent,
        **options,
    )
    both = e2e.measure(
        lm,
        ["one", "two"],
        "sot",
        journal=Journal(out, {}, silent, revision="abc"),
        report=silent,
        **options,
    )
    assert both[0] == first[0]
    assert [row["prompt"] for row in both] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--method", "sot"], "--prompts"),
        (["--prompts", "no-such-file"], "no-such-file"),
        (["--pairs", "0"], "--pairs"),
        (["--limit", "0"], "--limit"),
        (["--max-tokens", "0"], "--max-tokens"),
        ([], "--method"),
        (["--method", "sut"], "sut"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], named: str, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [] if named in ("--prompts", "no-such-file") else ["--prompts", str(prompts)]
    assert main(["bench", "e2e", *given, *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert named in captured.err
