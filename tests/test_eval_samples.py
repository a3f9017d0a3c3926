"""Several answers a prompt, boxed answers, what is kept in view, budgets."""

from __future__ import annotations

import csv
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_lms import tiny_lm

from stretto import LM, Completion, SamplingParams
from stretto.cli import eval_run, main
from stretto.data.rows import read_rows
from stretto.errors import InvalidInput
from stretto.eval.answers import live_of
from stretto.eval.budgets import Length, budget_for, mean_live
from stretto.eval.by_prompt import by_prompt, majority
from stretto.eval.judges import Comparison, JudgeSettings, Question, open_judge
from stretto.eval.judges.reference import ReferenceJudge
from stretto.eval.plots import points_of
from stretto.eval.rows import EvalRow
from stretto.eval.statistics import estimate_mean, estimate_quotient
from stretto.eval.task_boxed import boxed, last_boxed, normal
from stretto.eval.tasks import Item, Source, get_task, load_prompts
from stretto.trace import live_tokens

# -- boxed answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"so \boxed{7}, no: \boxed{ 42 }.", " 42 "),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {3}", "3"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{4 and then \boxed{5}", "5"),
        (r"\boxed{1 + \boxed{5}}", "5"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        ("} \\boxed{6}", "6"),
        ("\\boxed{" * 20_000, None),
        ("the answer is 7", None),
    ],
)
def test_the_last_whole_box_counts(text: str, held: str | None) -> None:
    assert last_boxed(text) == held


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("033", "33"), ("-0", "0"), ("+5", "5"), ("12{,}345", "12345"), ("1,234.0", "1234"),
        ("$18$", "18"), (r"\$18", "18"), ("18.", "18"), (r"90^\circ", "90"), (r"50\%", "50"),
        (r"18\text{ cm}", "18"), (r"\dfrac12", r"\frac12"), (r"\left(1, 2\right)", "(1,2)"),
        ("9" * 5000, "0" + "9" * 5000),
    ],
)  # fmt: skip
def test_what_says_the_same_has_one_form(one: str, two: str) -> None:
    assert normal(one) == normal(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [("18", "18.5"), ("18", "-18"), ("1,23", "123"), (r"\frac12", "0.5"), ("", "0"), ("x", "y")],
)
def test_what_says_another_thing_has_another_form(one: str, two: str) -> None:
    assert normal(one) != normal(two)


def test_a_right_box_scores_and_an_answer_without_one_has_no_vote() -> None:
    item = Item("p", "042")
    assert boxed(item, r"7, so \boxed{42}").value == 1
    assert boxed(item, r"\boxed{42} or \boxed{43}").value == 0
    assert boxed(item, r"\boxed{42}").vote == boxed(item, r"\boxed{ 42.0 }").vote == "42"
    assert (boxed(item, "42").value, boxed(item, "42").vote) == (0, None)


def test_problems_of_the_usual_files_are_read(tmp_path: Path) -> None:
    lines = [
        {"problem": "AIME", "answer": 33},
        {"problem": "AIME again", "answer": "033"},
        {"problem": "MATH", "solution": r"Thus \boxed{\frac{1}{2}}."},
        {"question": "GSM8K", "answer": "3 * 6 = 18\n#### 18"},
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, end in (("math", "\\boxed{}."), ("boxed", "")):
        task = get_task(name)
        items = {item.gold: item for item in load_prompts(task, Source((path,))).items}
        assert set(items) == {"33", "033", r"\frac{1}{2}", "18"}
        assert all(item.prompt.endswith(end) for item in items.values())
        assert task.score is not None
        assert task.score(items[r"\frac{1}{2}"], r"\boxed{\dfrac{1}{2}}").value == 1
    path.write_text('{"problem": "none"}\n')
    with pytest.raises(InvalidInput, match=r"problems.jsonl:1 has no text in field"):
        load_prompts(get_task("boxed"), Source((path,)))


# -- several answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        ([("a", 1.0), ("b", 0.0), ("a", 1.0)], 1.0),
        ([("a", 1.0), ("b", 0.0), ("b", 0.0)], 0.0),
        ([("a", 1.0), ("b", 0.0)], 0.5),
        ([(None, 0.0), (None, 0.0), ("a", 1.0)], 1.0),
        ([(None, 0.0), (None, 0.0)], 0.0),
    ],
)
def test_majorities(votes: list[tuple[str | None, float | None]], value: float) -> None:
    assert majority(votes) == value


def figure(prompt: str, score: float, vote: str | None, realized: float = 1.0) -> dict[str, Any]:
    sides = {"score": score, "vote": vote, "baseline_score": None, "baseline_vote": None}
    return {"prompt_id": prompt, "realized": realized, **sides}


def test_samples_of_a_prompt_become_one_figure() -> None:
    rows = [figure("p", 1, "a", 2.0), figure("p", 0, "b", 8.0), figure("p", 1, "a", 4.0)]
    one, two = by_prompt([*rows, figure("q", 0, "c")], has_votes=True)
    assert (one["score"], one["majority"]) == (pytest.approx(2 / 3), 1)
    assert one["realized"] == pytest.approx(4.0)
    assert (two["score"], two["majority"]) == (0, None)
    assert one["baseline_majority"] is None
    assert by_prompt(rows)[0]["majority"] is None


def test_intervals_are_over_prompts_whatever_the_samples() -> None:
    """Samples that only repeat themselves say nothing more of other prompts."""
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    rows = [figure(str(k), v, str(v)) for k, v in enumerate(values) for _ in range(16)]
    prompts = by_prompt(rows)
    assert estimate_mean([p["score"] for p in prompts], 0) == estimate_mean(values, 0)


def test_a_quotient_is_of_sums_with_whole_prompts_drawn() -> None:
    found = estimate_quotient([4.0, 0.0, 1.0], [4.0, 1.0, 3.0], 0)
    assert found.value == 5 / 8
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low < 5 / 8 < found.high <= 1
    assert estimate_quotient([0.0], [0.0], 0).value is None


MODELS: dict[str, LM] = {}


@pytest.fixture
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(loader: eval_run.Loader, name: str) -> LM:
        key = f"{name}/{loader.page_size}"
        if key not in MODELS:
            dialect = name if name == "tip" else "plain"
            MODELS[key] = tiny_lm(dialect, page_size=loader.page_size)
        return MODELS[key]

    monkeypatch.setattr(eval_run.Loader, "load", load)
    monkeypatch.setattr("stretto.eval.identity.folder_of", lambda name: None)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    lines = [{"problem": f"What is {n} and {n}?", "answer": 2 * n} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def evaluate(out: Path, prompts: Path, *more: str) -> int:
    return main(
        ["eval", "run", "--task", "boxed", "--prompts", str(prompts), "--out", str(out),
         "--pairs", "0", "--max-tokens", "12", *more]
    )  # fmt: skip


SAMPLED = ("--n", "3", "--temperature", "0.9", "--top-p", "0.95")


@pytest.mark.usefixtures("_models")
def test_a_run_of_several_samples_goes_on_and_counts_prompts(
    tmp_path: Path, problems: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    asked = ("--model", "plain", "--baseline", "none", *SAMPLED, "--json")
    assert evaluate(out, problems, *asked) == 0
    summary = json.loads(capfd.readouterr().out)
    rows = read_rows(out / "rows.jsonl", EvalRow)
    assert sorted((row.number, row.sample) for row in rows) == [
        (k, s) for k in (1, 2, 3) for s in range(3)
    ]
    assert len({row.ours.text for row in rows if row.ours}) > 3
    assert summary["counts"]["prompts"] == 3
    assert summary["counts"]["answers"] == 9
    quality = summary["quality"]
    assert quality["accuracy"]["value"] == quality["majority"]["value"] == 0
    cut = [row.ours is not None and row.ours.finish_reason == "length" for row in rows]
    assert quality["truncated"]["value"] == pytest.approx(100 * statistics.mean(cut))
    assert summary["throughput"]["answers"] == 9
    assert summary["throughput"]["tokens"] == sum(r.ours.drawn_tokens for r in rows if r.ours)
    assert summary["throughput"]["tokens_per_s"] > 0
    config = json.loads((out / "config.json").read_text())
    assert (config["sampling"]["samples"], config["sampling"]["top_p"]) == (3, 0.95)
    path = out / "rows.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    assert main(["eval", "compare", str(out)]) == 2
    assert "4 of 9 answers" in capfd.readouterr().err
    assert evaluate(out, problems, *asked) == 0
    again = read_rows(path, EvalRow)
    assert {r.key: r.ours for r in again} == {r.key: r.ours for r in rows}


@pytest.mark.usefixtures("_models")
def test_several_samples_are_refused_where_they_mean_nothing(
    tmp_path: Path, problems: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    for more, named in (
        (("--n", "2"), "--temperature"),
        ((*SAMPLED, "--judge", "llm:a"), "--judge"),
        (("--n", "0"), "--n"),
        (("--batch", "0"), "--batch"),
    ):
        assert evaluate(out, problems, "--model", "plain", *more) == 2
        assert named in capfd.readouterr().err.splitlines()[-1]
    assert evaluate(out, problems, "--model", "plain", *SAMPLED) == 0
    for verb in (["judge", "--judge", "exact"], ["export", "--out", str(tmp_path / "out.json")]):
        capfd.readouterr()
        assert main(["eval", verb[0], str(out), *verb[1:], "--prompts", str(problems)]) == 2
        assert "3 answers to each prompt" in capfd.readouterr().err.splitlines()[-1]


# -- what is kept in view --------------------------------------------------------------------------


def test_an_answer_tells_what_it_kept_in_view() -> None:
    lm = tiny_lm(page_size=4)
    params = SamplingParams(max_tokens=20)
    (dense,) = lm.generate("one two", params)
    (window,) = lm.generate("one two", params, method="window,budget=12,page_tokens=4")
    rows = [live_of(completion, 4) for completion in (dense, window)]
    assert rows[0].generated_mean == rows[0].dense_generated_mean == 10.5
    assert rows[1].dense_generated_mean == 10.5
    assert rows[1].peak <= 12
    assert rows[1].generated_mean < 10.5
    for row in rows:
        assert row.page_size == 4
        assert row.mean <= row.slots_mean <= row.reserved_peak
        assert row.slots_peak % 4 == row.reserved_peak % 4 == 0
        assert row.slots_peak <= row.reserved_peak
        assert row.reserved_mean is not None
        assert row.reserved_mean < row.reserved_peak
    prompt = sum(map(len, dense.trace.prompt))
    held = [4 * (-(-prompt // 4) + -(-k // 4)) for k in range(20)]  # k tokens fed after the prompt
    assert rows[0].reserved_mean == pytest.approx(statistics.mean(held))
    assert rows[1].reserved_mean < rows[0].reserved_mean
    pages = [4 * (-(-prompt // 4) + -(-(k + 1) // 4)) for k in range(20)]
    assert live_tokens(dense.trace, 4).mean == pytest.approx(statistics.mean(pages))
    assert rows[0].generated_slots_mean == pytest.approx(
        statistics.mean(pages) - 4 * -(-prompt // 4)
    )


ARMS = (
    "dense=plain", "window=plain:window,budget=16,page_tokens=4",
    "h2o=plain:paged_h2o,budget=64,pin_prompt,page_tokens=4",
    "random=plain:random_evict,budget=24,page_tokens=4", "tip=tip",
)  # fmt: skip


@pytest.mark.usefixtures("_models")
def test_every_method_is_an_arm_with_its_settings(
    tmp_path: Path, problems: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    named = [part for arm in ARMS for part in ("--arm", arm)]
    more = ("--baseline", "none", "--page-size", "4", "--engine", "hf", "--json", "--n", "2",
            "--temperature", "1")  # fmt: skip
    assert evaluate(out, problems, *named, *more) == 0
    table = {row["run"]: row for row in json.loads(capfd.readouterr().out)["runs"]}
    assert table["window"]["method"] == "window,budget=16,page_tokens=4"
    assert table["h2o"]["method"] == "paged_h2o,budget=64,pin_prompt,page_tokens=4"
    assert table["dense"]["live_share"] == 1
    assert table["window"]["live_peak"] <= 16 < table["dense"]["live_peak"]
    assert table["window"]["live_slots"] >= table["window"]["live"]
    assert table["window"]["reserved"] < table["dense"]["reserved"]
    folders = [str(out / arm.partition("=")[0]) for arm in ARMS]
    assert main(["eval", "plot", *folders, "--out", str(tmp_path / "plots"), "--json"]) == 0
    assert "live_generated.png" in json.loads(capfd.readouterr().out)
    with (tmp_path / "plots" / "live_generated.csv").open() as file:
        points = {row["run"]: row for row in csv.DictReader(file)}
    assert float(points["dense"]["speed"]) == table["dense"]["live_generated"]
    config = json.loads((out / "dense" / "config.json").read_text())
    assert config["place"]["page_size"] == 4
    answers = ["eval", "budget", folders[0], "--json", "--method"]
    assert main([*answers, "window,pin_prompt"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["mean"] == pytest.approx(found["target"], abs=0.5)
    assert found["method"] == f"window,budget={found['budget']},pin_prompt"
    for method, said in (
        ("window,budget=3", "budget"), ("sot", "policy"), ("paged_h2o", "--counted all"),
    ):  # fmt: skip
        assert main([*answers, method]) == 2
        assert said in capfd.readouterr().err.splitlines()[-1]


def test_less_in_view_is_better_in_the_plot() -> None:
    rows = [
        {"run": name, **{f"{key}{end}": value for end in ("", "_low", "_high")
                         for key, value in (("live_generated", live), ("accuracy", quality))}}
        for name, live, quality in (("dense", 100.0, 50.0), ("tip", 40.0, 50.0), ("bad", 60.0, 9.0))
    ]  # fmt: skip
    points = points_of(rows, "live_generated", "accuracy", 60.0, 120.0)
    assert {p["run"]: p["on_front"] for p in points} == {
        "baseline": True, "dense": False, "tip": True, "bad": False,
    }  # fmt: skip
    assert points[0]["speed"] == 120.0


# -- budgets ---------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 40), st.integers(1, 60), st.integers(0, 10))
def test_means_within_a_budget_are_those_counted(b: int, p: int, t: int, held: int) -> None:
    rows = [min(p + i + 1, b) for i in range(t)]
    assert mean_live(b, Length(p, t)) == pytest.approx(statistics.mean(rows))
    own = [min(i + 1, max(0, b - held)) for i in range(t)]
    length = Length(p, t, held)
    assert mean_live(b, length, generated=True) == pytest.approx(statistics.mean(own))
    if p < b <= p + t:
        closed = b - (b - p) * (b - p - 1) / (2 * t)
        assert mean_live(b, Length(p, t)) == pytest.approx(closed)


@given(st.floats(0, 1), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), min_size=1))
def test_the_budget_comes_nearest_to_the_target(share: float, sizes: list[tuple[int, int]]) -> None:
    lengths = [Length(p, t) for p, t in sizes]
    dense = statistics.mean(p + (t + 1) / 2 for p, t in sizes)
    target = share * dense
    means = [statistics.mean(mean_live(b, n) for n in lengths) for b in range(90)]
    assert all(a <= b for a, b in pairwise(means))
    gap = abs(means[budget_for(target, lengths)] - target)
    assert gap <= min(abs(m - target) for m in means[1:]) + 1e-9
    with pytest.raises(InvalidInput, match="no budget holds"):
        budget_for(dense + 1, lengths)


def test_a_policy_with_that_budget_holds_that_much() -> None:
    lm = tiny_lm()
    params = SamplingParams(max_tokens=40)

    def answer_by(method: str) -> Completion:
        forced = lm.submit("one two three", params, method=method, script=lambda _, i: 20 + i % 7)
        return forced.finish()

    dense = answer_by("dense")
    prompt = dense.usage.prompt_tokens
    for method, held in (("window", 0), ("window,pin_prompt", prompt), ("streaming_llm", 4)):
        size = Length(prompt, dense.trace.num_tokens, held)
        budget = budget_for(12.0, [size], generated=True)
        name, _, rest = method.partition(",")
        spelled = f"{name},budget={budget},page_tokens=1{',' + rest if rest else ''}"
        held_mean = answer_by(spelled).live_kv.generated_mean
        assert held_mean == pytest.approx(12.0, abs=0.5)
        assert held_mean == pytest.approx(mean_live(budget, size, generated=True))


# -- a judge without a language model --------------------------------------------------------------


def references(path: Path, *lines: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_nearer_answer_is_preferred(tmp_path: Path) -> None:
    one = references(tmp_path / "one.jsonl", {"instruction": "p", "output": "the cat sat down"})
    two = references(tmp_path / "two.jsonl", {"instruction": "p", "output": "a dog barked loudly"})
    judge = open_judge(JudgeSettings("reference", references=(one,)))
    both = open_judge(JudgeSettings("reference", references=(one, two)))
    near, far, dog = "the cat sat", "nothing of it", "a dog barked"
    comparisons = [
        Comparison("p", near, far), Comparison("p", far, near), Comparison("p", near, near),
        Comparison("unknown", near, far), Comparison("p", "", far),
    ]  # fmt: skip
    found = [None if v is None else v.preference for v in judge.compare(comparisons)]
    assert found[:4] == [1, -1, 0, None]
    (alone,) = judge.compare([Comparison("p", near, dog)])
    (with_dog,) = both.compare([Comparison("p", far, dog)])
    assert alone is not None
    assert with_dog is not None
    assert (alone.preference, with_dog.preference) == (1, -1)
    assert "cat sat down" not in json.dumps(alone.details)
    assert judge.identity != both.identity
    assert judge.identity.startswith("reference:chrf++;")
    (measured,) = judge.measure([Question("p", (near, far))])
    assert measured is not None
    near_to, far_from = (measure["chrf"] for measure in measured)
    assert 100 >= near_to > far_from >= 0
    assert judge.qualities([measured, [{"chrf": 2.0}] * 2, [{"chrf": None}] * 2]) == [
        [pytest.approx(1), pytest.approx(-1)], [0, 0], [None, None],
    ]  # fmt: skip


def test_nearness_is_chrf_with_words(tmp_path: Path) -> None:
    """By hand for one word of one letter more: n-grams of up to 4 letters, one word."""
    one = references(tmp_path / "one.jsonl", {"prompt": "p", "answer": "abc"})
    judge = ReferenceJudge.read([one])
    assert judge.nearness("p", "abc") == pytest.approx(100)
    assert judge.nearness("p", "xyz") == 0
    shares = [(3 / 4, 1), (2 / 3, 1), (1 / 2, 1)]  # precision and recall of 1, 2 and 3 letters
    words = [(0, 0)]
    precision, recall = (sum(s[k] for s in shares + words) / 4 for k in (0, 1))
    wanted = 100 * 5 * precision * recall / (4 * precision + recall)
    assert judge.nearness("p", "abcd") == pytest.approx(wanted)
    assert judge.nearness("another", "abc") is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "reference"}, "--references"),
        ({"kind": "reference", "model": "a-model"}, "a model"),
        ({"kind": "exact", "references": (Path("a"),)}, "--references"),
        ({"kind": "llm", "reference_field": "a"}, "--reference-field"),
    ],
)
def test_settings_of_other_judges_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        open_judge(JudgeSettings(**settings))


def test_files_without_references_are_refused(tmp_path: Path) -> None:
    path = references(tmp_path / "a.jsonl", {"instruction": "p", "output": " "})
    for field, named in ((None, "a.jsonl:1 lacks"), ("gold", "in gold")):
        with pytest.raises(InvalidInput, match=named):
            open_judge(JudgeSettings("reference", references=(path,), reference_field=field))
    with pytest.raises(InvalidInput, match="no references"):
        open_judge(JudgeSettings("reference", references=(references(tmp_path / "b.jsonl"),)))
