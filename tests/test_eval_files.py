"""A run's files as somebody may have left them: told in a line, or read as they were meant."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from eval_runs import PROMPTS, config, row, write

from stretto.cli import main
from stretto.data.rows import prompt_id
from stretto.errors import InvalidInput
from stretto.eval import folder, metrics
from stretto.eval.compare import compare
from stretto.eval.folder import load_run, read_verdicts
from stretto.eval.judges import Comparison, JudgeSettings, Measure, Question, Verdict
from stretto.eval.judges.base import Judge
from stretto.eval.rows import EvalRow
from stretto.eval.summary import figures, judged, summary_of


def verdict(text: str, preference: Any, judge: str = "llm:a;{}") -> dict[str, Any]:
    return {"prompt_id": prompt_id(text), "preference": preference, "judge": judge}


def test_settings_from_before_there_was_a_choice_stand_for_it(tmp_path: Path) -> None:
    run = load_run(write(tmp_path / "a"))
    assert run.num_samples == 1
    summary = summary_of(run)
    assert summary["live_kv"] == {}
    assert summary["throughput"] is None
    assert summary["counts"]["prompts"] == summary["counts"]["answers"] == len(PROMPTS)
    sampling = {
        "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 0,
        "samples": 1,
    }  # fmt: skip
    now = config(sampling=sampling)
    now["place"]["page_size"] = 1
    now["task"] |= {"size": "", "has_votes": False}
    folder.start(tmp_path / "a", now)  # goes on
    with pytest.raises(InvalidInput, match=r"sampling.samples is 1 there and 2 here"):
        folder.start(tmp_path / "a", now | {"sampling": sampling | {"samples": 2}})


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    """Sets the value at a place such as `ours.scored_by`."""

    def change(found: dict[str, Any]) -> Any:
        *parts, last = path.split(".")
        part = found
        for name in parts:
            part = part[name]
        part[last] = value
        return found

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("task", 3), ("task", {}), ("task", None), ("ours", None), ("ours", {}), ("baseline", "a"),
        ("ours.scored_by", 3), ("ours.scored_by", [3]), ("baseline.scored_by", None),
        ("sampling", {}), ("sampling", []), ("sampling.seed", "0"), ("sampling.seed", -1),
        ("task.num_prompts", "3"), ("task.num_prompts", True), ("task.skip_if", "a"),
        ("place", "cpu"), ("pairs", None), ("pairs", {}), ("sampling.samples", 0),
    ],
)  # fmt: skip
def test_settings_of_a_wrong_type_are_told_by_name(path: str, value: Any, tmp_path: Path) -> None:
    out = write(tmp_path / "a", config=changed(path, value)(config()))
    with pytest.raises(InvalidInput) as told:
        load_run(out)
    assert "config.json" in str(told.value)
    assert path.partition(".")[0] in str(told.value)
    assert "\n" not in str(told.value)
    with pytest.raises(InvalidInput, match=r"config.json"):
        folder.start(out, config())


@pytest.mark.parametrize("value", [3, None, [], "text"])
def test_settings_that_are_no_object_are_told(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"config.json is not what"):
        load_run(write(tmp_path / "a", config=value))


@pytest.mark.parametrize(
    "value",
    [{}, [1], [{}], [{"machine": 3}], [{"machine": {}, "throughput": 3}],
     [{"machine": {"revision": 3}}], [{"machine": {}, "throughput": {"tokens": 3}}]],
)  # fmt: skip
def test_environments_that_are_none_are_told(value: Any, tmp_path: Path) -> None:
    out = write(tmp_path / "a", environment=value)
    for what in (lambda: summary_of(load_run(out)), lambda: folder.add_environment(out, {})):
        with pytest.raises(InvalidInput, match=r"environment.json is not what"):
            what()


def test_a_row_that_comes_twice_is_told(tmp_path: Path) -> None:
    rows = [row(k, text) for k, text in enumerate(PROMPTS, 1)]
    out = write(tmp_path / "a", rows=[*rows, rows[1]])
    with pytest.raises(InvalidInput, match=f"row {prompt_id('two')} twice"):
        load_run(out)
    two_of_one = write(tmp_path / "b", rows=[rows[0], rows[0], rows[1]])
    with pytest.raises(InvalidInput, match="twice"):
        load_run(two_of_one)
    with pytest.raises(InvalidInput, match="4 rows for 3 prompts"):
        load_run(write(tmp_path / "c", rows=[*rows, row(4, "four")]))


@pytest.mark.parametrize("preference", [-0.1, 1.5, float("nan"), float("inf"), "0.5", True])
def test_a_preference_is_from_0_to_1(preference: Any, tmp_path: Path) -> None:
    out = write(tmp_path / "a", verdicts={"llm": [verdict("one", preference)]})
    with pytest.raises(InvalidInput, match=r"verdicts.llm.jsonl:1"):
        load_run(out)


def test_two_verdicts_on_a_prompt_are_told(tmp_path: Path) -> None:
    lines = [verdict("one", 1.0), verdict("one", 0.0)]
    with pytest.raises(InvalidInput, match="two verdicts"):
        read_verdicts(write(tmp_path / "a", verdicts={"llm": lines}), None)


def test_a_verdict_without_an_answer_of_the_baseline_has_no_length(tmp_path: Path) -> None:
    rows = [row(k, text) for k, text in enumerate(PROMPTS, 1)]
    rows[1] |= {"baseline": None, "errors": {"baseline": "why"}}
    lines = [verdict(text, 1.0) for text in PROMPTS]
    run = load_run(write(tmp_path / "a", rows=rows, verdicts={"llm": lines}))
    assert judged(figures(run)).longer_chars[prompt_id("two")] == 0
    assert summary_of(run)["quality"]["win_rate"]["value"] == 100


# -- several runs, one judge -----------------------------------------------------------------------


class Fixed:
    """Prefers ours, always. Notes when it was opened and closed."""

    identity = "likelihood:a#1;{}"

    def __init__(self, log: list[str]) -> None:
        self._log = log
        log.append("open")

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure]]:
        raise NotImplementedError

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        raise NotImplementedError

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        self._log.append(f"compare {len(comparisons)}")
        return [Verdict("a", 1.0) for _ in comparisons]

    def close(self) -> None:
        self._log.append("close")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []

    def opened(settings: JudgeSettings) -> Judge:
        return Fixed(noted)

    monkeypatch.setattr("stretto.eval.judges.open_judge", opened)
    return noted


def test_several_runs_are_judged_by_one_model_loaded_once(
    tmp_path: Path, log: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write(tmp_path / name)) for name in "ab"]
    assert main(["eval", "judge", *runs, "--judge", "likelihood", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["runs"]
    assert [s["run"] for s in found] == ["a", "b"]
    assert {s["quality"]["win_rate"]["value"] for s in found} == {100}
    assert log == ["open", "compare 3", "compare 3", "close"]
    for out in runs:
        assert (Path(out) / "verdicts.likelihood.jsonl").is_file()
        assert (Path(out) / "summary.json").is_file()


def test_nothing_is_loaded_for_runs_that_cannot_be_judged(
    tmp_path: Path, log: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "a"), write(tmp_path / "b", rows=[row(1, "one")])
    alone = write(tmp_path / "c", config=config(baseline=None))
    for runs, named in (
        ((good, bad), "1 of 3 prompts"), ((good, good), "twice"), ((good, alone), "no baseline"),
    ):  # fmt: skip
        assert main(["eval", "judge", *map(str, runs), "--judge", "likelihood"]) == 2
        assert named in capfd.readouterr().err.splitlines()[-1]
    assert "open" not in log


def test_references_leave_nothing_but_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = write(tmp_path / "a")
    path = tmp_path / "references.jsonl"
    lines = [{"instruction": text, "output": f"secret ours of {text}"} for text in PROMPTS[:2]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = ["eval", "judge", str(out), "--judge", "reference", "--references", str(path)]
    assert main(told) == 3  # the third has none
    assert f"1 prompts have no verdict: {prompt_id(PROMPTS[2])}" in capfd.readouterr().err
    verdicts = read_verdicts(out, "reference")
    assert verdicts is not None
    assert [verdicts.preferences[prompt_id(text)] for text in PROMPTS] == [1.0, 1.0, None]
    assert not any("secret" in file.read_text() for file in out.iterdir())


# -- one scale -------------------------------------------------------------------------------------

LIKELIHOOD = "likelihood:a#1;{}"


def measured(text: str, value: float, brevity: float = 0.0, **more: Any) -> dict[str, Any]:
    """A verdict of judge `likelihood`, whose own scale is forgotten."""
    details = {"a": value, "b": 0.0, "log_length": 0.0, "brevity": brevity}
    return verdict(text, 0.9, LIKELIHOOD) | {"details": details | more}


def rate_of(*preferences: float) -> float:
    """The win rate of preferences from -1 to 1."""
    return 50 * (1 + sum(preferences) / len(preferences))


def test_runs_that_are_compared_are_on_one_scale(tmp_path: Path) -> None:
    """Each on its own, both would have tanh(1)."""
    runs = [
        load_run(write(tmp_path / name, verdicts={
            "likelihood": [measured(text, value) for text in PROMPTS]
        }))
        for name, value in (("a", 0.1), ("b", 1.0))
    ]  # fmt: skip
    both = compare(runs)
    spread = math.sqrt((0.1**2 + 1) / 2)
    rates = [rate_of(math.tanh(value / spread)) for value in (0.1, 1.0)]
    assert [row["win_rate"] for row in both["runs"]] == pytest.approx(rates)
    (paired,) = (line for line in both["paired"] if line["figure"] == "win_rate")
    assert paired["value"] == pytest.approx(rates[1] - rates[0])
    alone = [compare([run])["runs"][0]["win_rate"] for run in runs]
    assert alone == pytest.approx([rate_of(math.tanh(1))] * 2)


def test_what_was_not_measured_keeps_its_preference(tmp_path: Path) -> None:
    same = verdict("two", 0.5, LIKELIHOOD) | {"details": {"same": True}}
    lines = [measured("one", 1.0), same, verdict("three", None, LIKELIHOOD)]
    del lines[2]["preference"]
    run = load_run(write(tmp_path / "a", verdicts={"likelihood": lines}))
    assert compare([run])["runs"][0]["win_rate"] == pytest.approx(rate_of(math.tanh(1), 0.0))
    llm = [measured(text, 1.0) | {"judge": "llm:a;{}"} for text in PROMPTS]
    other = load_run(write(tmp_path / "b", verdicts={"llm": llm}))
    (row,) = compare([other])["runs"]
    assert (row["win_rate"], row["win_rate_no_brevity"]) == (90, None)


def test_win_rates_without_brevity_and_by_how_the_baseline_ended(tmp_path: Path) -> None:
    rows = [row(k, text) for k, text in enumerate(PROMPTS, 1)]
    rows[2]["baseline"]["finish_reason"] = "length"
    lines = [measured("one", 1.0, -3.0), measured("two", -1.0, 0.0), measured("three", 1.0, 2.0)]
    run = load_run(write(tmp_path / "a", rows=rows, verdicts={"likelihood": lines}))
    (found,) = compare([run])["runs"]
    one, two, three = math.tanh(-2), math.tanh(-1), math.tanh(3)
    assert found["win_rate"] == pytest.approx(rate_of(one, two, three))
    assert found["win_rate_baseline_ended"] == pytest.approx(rate_of(one, two))
    assert found["win_rate_baseline_cut"] == pytest.approx(rate_of(three))
    free = rate_of(math.tanh(1), math.tanh(-1), math.tanh(1))
    assert found["win_rate_no_brevity"] == pytest.approx(free)
    assert found["wins"] == pytest.approx(100 / 3)
    assert found["wins_low"] <= found["wins"] <= found["wins_high"]


def test_rows_are_put_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    rows = [row(k, text) for k, text in enumerate(PROMPTS, 1)]
    out = write(tmp_path / "a", rows=[rows[1], rows[2] | {"sample": 1}, rows[2], rows[0]])
    before = (out / "rows.jsonl").read_bytes()
    folder.put_in_order(out)
    after = (out / "rows.jsonl").read_bytes()
    found = [(r["number"], r.get("sample", 0)) for r in map(json.loads, after.splitlines())]
    assert found == [(1, 0), (2, 0), (3, 0), (3, 1)]
    assert sorted(after.splitlines()) == sorted(before.splitlines())


SPEEDS = ("theoretical", "theoretical_ended", "theoretical_baseline_ended", "matched")


@pytest.mark.parametrize(
    ("ends", "speeds"),
    [
        (("stop", "stop"), (4.0, 4.0, 4.0, 2.0)),
        (("length", "stop"), (4.0, None, 4.0, 2.0)),
        (("stop", "length"), (4.0, None, None, 2.0)),
        (("length", "length"), (4.0, None, None, 2.0)),
    ],
)
def test_speed_ups_are_told_apart_by_who_ended(
    ends: tuple[str, str], speeds: tuple[float | None, ...]
) -> None:
    found = row(1, "a")
    for side, end in zip(("ours", "baseline"), ends, strict=True):
        found[side]["finish_reason"] = end
    found["ours"] |= {"completion_tokens": 6, "sequential_steps": 3}
    found["baseline"] |= {"drawn_tokens": 12}
    figures = metrics.figures_of(EvalRow.model_validate(found))
    assert tuple(figures[name] for name in SPEEDS) == speeds


def test_matched_counts_the_shorter_answer_whichever_it_is() -> None:
    found = row(1, "a")
    found["ours"] |= {"completion_tokens": 60, "sequential_steps": 10}
    found["baseline"] |= {"drawn_tokens": 20}
    assert metrics.figures_of(EvalRow.model_validate(found))["matched"] == 2
