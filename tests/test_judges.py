"""Judges behind their interface: identities, `exact`, `likelihood`, length control."""

from __future__ import annotations

import copy
import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_lms import tiny_lm

from stretto import LM
from stretto.errors import InvalidInput, UnknownName
from stretto.eval.judges import (
    Comparison,
    Identity,
    JudgeSettings,
    Question,
    Verdict,
    check_different,
    judges_of,
    open_judge,
)
from stretto.eval.judges.exact import ExactJudge, ExpectedAnswers, last_number
from stretto.eval.judges.likelihood import (
    REPEAT_TOKENS,
    LikelihoodJudge,
    brevity,
    repeated,
    weights_fingerprint,
)
from stretto.eval.judges.scale import Gap, Scale
from stretto.eval.judges.standard import Point, length_slope, standardised
from stretto.models.embedded import EMBEDDED_MODEL

# -- identities ------------------------------------------------------------------------------------


def test_an_identity_comes_back_from_its_text() -> None:
    made = Identity("llm", "org/model:latest", {"b": 1, "a": [2]})
    assert str(made) == 'llm:org/model:latest;{"a": [2], "b": 1}'
    assert Identity.parse(str(made)) == made


@pytest.mark.parametrize("model", ["a;b", "a;b#12;{}", "x;{", ";", "a:b"])
def test_a_models_name_may_have_any_mark_in_it(model: str) -> None:
    made = Identity("likelihood", model, {"length": "slope; ridge 1"})
    assert Identity.parse(str(made)).is_same_judge(made)
    with pytest.raises(InvalidInput, match="report with another judge"):
        check_different(str(made), str(made))


@pytest.mark.parametrize("text", ["", "llm", ":m", "llm:m;[1]", "llm:m;{"])
def test_what_is_no_identity_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="no judge's identity"):
        Identity.parse(text)


def test_the_judge_that_scored_may_not_report() -> None:
    scored = ['llm:gemini;{"temperature": 0}', "likelihood:a#123;{}"]
    check_different(scored, "llm:gpt;{}")
    check_different([], "llm:gemini;{}")
    with pytest.raises(InvalidInput, match=r"llm:gemini scored .* report with another judge"):
        check_different(scored, 'llm:gemini;{"temperature": 1}')
    with pytest.raises(InvalidInput, match="likelihood:b#123 scored"):
        check_different(scored, "likelihood:b#123;{}")  # the same weights by another name
    check_different(scored, "likelihood:a#456;{}")
    check_different("exact:numbers;{}", "exact:numbers;{}")  # a fact may be told twice


def test_who_scored_is_read_from_the_models_folder(tmp_path: Path) -> None:
    assert judges_of(tmp_path) == []
    (tmp_path / "preference.json").write_text(json.dumps({"scored_by": ["llm:m;{}"]}))
    assert judges_of(tmp_path) == ["llm:m;{}"]
    for bad in ("{", "{}", '{"scored_by": "llm"}', "[]"):
        (tmp_path / "preference.json").write_text(bad)
        with pytest.raises(InvalidInput, match="does not say who scored"):
            judges_of(tmp_path)


def test_a_judge_by_a_wrong_name_gets_a_hint() -> None:
    with pytest.raises(UnknownName, match="did you mean 'likelihood'"):
        open_judge(JudgeSettings("likelyhood"))
    with pytest.raises(InvalidInput, match="--expected"):
        open_judge(JudgeSettings("exact"))


@pytest.mark.parametrize(("asked", "loaded"), [(None, EMBEDDED_MODEL), ("another", "another")])
def test_a_likelihood_is_that_of_the_embedded_base_model(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, loaded: str
) -> None:
    """Not that of the default of `run`, which is taught to do what is judged."""
    names: list[Any] = []
    monkeypatch.setattr(LM, "load", lambda name, **_: names.append(name) or tiny_lm())
    open_judge(JudgeSettings("likelihood", model=asked))
    assert names == [loaded]


@pytest.mark.parametrize(
    ("kind", "setting", "named"),
    [
        ("likelihood", {"url": "http://x"}, "--judge-url"),
        ("likelihood", {"max_cost": 0.0}, "--max-cost"),
        ("llm", {"model": "m", "expected": Path("x")}, "--expected"),
        ("exact", {"model": "m"}, "a model"),
        ("exact", {"price_in": 1.0}, "--price-in"),
    ],
)
def test_what_only_another_judge_has_is_refused(kind: str, setting: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=f"judge {kind} has no use for {named}"):
        JudgeSettings(kind, **setting)


def test_preference_has_the_winners_sign() -> None:
    assert Verdict.of(-0.25, {}) == Verdict("b", 0.25)
    assert Verdict.of(0.0, {}).winner == "tie"
    assert [Verdict(w, 0.5).preference for w in ("a", "tie", "b")] == [0.5, 0.0, -0.5]


# -- exact -----------------------------------------------------------------------------------------


def test_numbers_are_compared_as_numbers_and_words_as_words(tmp_path: Path) -> None:
    file = tmp_path / "expected.jsonl"
    rows = [
        {"question": "sum?", "answer": "2 + 3 = 5\n#### 1,005"},
        {"question": "capital?", "answer": "Paris"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    judge = open_judge(JudgeSettings("exact", expected=file))
    questions = [
        Question("sum?", ("It is 1005.", "1,005.0", "1005 or 7", "none")),
        Question("capital?", (" paris. ", "Paris, France")),
    ]
    measured = [m for m in judge.measure(questions) if m is not None]
    assert judge.qualities(measured) == [[1, 1, 0, 0], [1, 0]]
    found = judge.compare([Comparison("sum?", "4", "1005"), Comparison("sum?", "4", "5")])
    assert [v.winner for v in found if v is not None] == ["b", "tie"]
    assert judge.identity == "exact:expected.jsonl;{}"
    with pytest.raises(InvalidInput, match="no expected answer for prompt"):
        list(judge.measure([Question("other?", ("1",))]))


def test_the_last_number_counts_with_its_sign() -> None:
    assert last_number("from -3 to -4.5") == -4.5
    assert last_number("a 10-5 win") == 5
    assert last_number("none") is None
    assert last_number("x = \N{MINUS SIGN}1,234.5") == -1234.5


def test_a_file_without_answers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "expected.jsonl"
    file.write_text('{"question": "sum?"}\n')
    with pytest.raises(InvalidInput, match=r"expected.jsonl:1 lacks"):
        ExpectedAnswers.read(file)
    file.write_text('{"question": "sum?", "answer": "it is #### "}\n')
    with pytest.raises(InvalidInput, match=r"expected.jsonl:1 lacks"):
        ExpectedAnswers.read(file)
    file.write_text("\n")
    with pytest.raises(InvalidInput, match="has no expected answers"):
        ExpectedAnswers.read(file)


def test_two_answers_to_one_prompt_are_refused_unless_they_are_one(tmp_path: Path) -> None:
    file = tmp_path / "expected.jsonl"
    rows = [{"question": "sum?", "answer": f"{how} #### 5"} for how in ("2 + 3", "4 + 1")]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert ExpectedAnswers.read(file)("sum?", "so 5") == 1
    rows[1]["answer"] = "6"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InvalidInput, match=r"expected.jsonl:2 has another answer .*'6', not '5'"):
        ExpectedAnswers.read(file)


def test_a_check_may_give_part_of_the_marks() -> None:
    judge = ExactJudge(lambda prompt, answer: answer.count("yes") / 4, "share")
    (verdict,) = judge.compare([Comparison("p", "yes yes yes", "yes")])
    assert verdict is not None
    assert (verdict.winner, verdict.confidence) == ("a", 0.5)


# -- length control --------------------------------------------------------------------------------


def test_the_slope_is_that_within_prompts() -> None:
    """Between the prompts longer answers score lower; within each, higher, by 0.5."""
    low = [Point(0.5 * x, x) for x in (1.0, 2.0, 4.0)]
    high = [Point(0.5 * x - 20, x) for x in (5.0, 6.0)]
    assert length_slope([low, high], ridge=0) == pytest.approx(0.5)
    assert length_slope([[Point(1.0, 2.0)], [Point(3.0, 5.0)]]) == 0
    assert length_slope([[Point(1.0, 2.0), Point(3.0, 2.0)]]) == 0


def test_few_answers_say_little_about_length() -> None:
    """Else the slope of a single pair would explain its whole difference."""
    pair = [Point(-2.0, 3.0), Point(-1.0, 4.0)]
    assert length_slope([pair]) == pytest.approx(1 / 3)
    assert length_slope([pair] * 1000) == pytest.approx(1, rel=0.01)


def test_scores_that_length_explains_do_not_differ() -> None:
    points: list[Point | None] = [Point(0.5 * x, x) for x in (1.0, 2.0, 4.0)]
    assert standardised([*points, None], 0.5) == [0, 0, 0, None]
    assert standardised([None], 0.5) == [None]


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8))
def test_standardised_scores_keep_their_order_and_have_unit_spread(values: list[int]) -> None:
    found = standardised([Point(v, 1.0) for v in values], 0.3)
    scores = [s for s in found if s is not None]
    assert sum(scores) == pytest.approx(0, abs=1e-6)
    if any(scores):
        assert math.sqrt(sum(s * s for s in scores) / len(scores)) == pytest.approx(1)
        assert max(range(len(values)), key=values.__getitem__) == scores.index(max(scores))


# -- likelihood ------------------------------------------------------------------------------------


@cache
def lm() -> LM:
    return tiny_lm()


def plain_logprobs(prompt: str, text: str) -> list[float]:
    """The specification: one pass over one answer alone, log-softmax over everything."""
    before, ids = lm().encode(lm().chat(prompt)), lm().vocabulary.encode(text)
    with torch.no_grad():
        logits = lm().model(torch.tensor([[*before, *ids]])).logits[0].log_softmax(-1)
    return [float(logits[len(before) - 1 + j, token]) for j, token in enumerate(ids)]


def test_a_batch_measures_what_single_passes_measure() -> None:
    texts = ("one", "two words", "a rather longer answer than the others", "x")
    judge = LikelihoodJudge(lm(), batch_tokens=80)
    (row,) = judge.measure([Question("what is it?", texts)])
    assert row is not None
    for text, measure in zip(texts, row, strict=True):
        logprobs = plain_logprobs("what is it?", text)
        assert measure["logprob"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-4)
        assert measure["num_tokens"] == len(logprobs)


def test_loops_are_not_counted_as_likely() -> None:
    looping = "go on and on " * 12
    judge = LikelihoodJudge(lm())
    (row,) = judge.measure([Question("say it", (looping,))])
    assert row is not None
    ids = lm().vocabulary.encode(looping)
    period = len(lm().vocabulary.encode("go on and on "))
    fresh = row[0]["num_tokens"] - row[0]["num_repeated"]
    assert row[0]["num_tokens"] == len(ids)
    assert fresh == period + REPEAT_TOKENS - 1
    logprobs = plain_logprobs("say it", looping)
    assert row[0]["logprob"] == pytest.approx(sum(logprobs[:fresh]) / fresh, abs=1e-4)


def test_what_is_a_repeat() -> None:
    assert repeated([1, 2, 1, 2, 1, 2], 2) == [False, False, False, True, True, True]
    assert repeated([1, 2, 3], 2) == [False, False, False]
    assert repeated([1], 8) == [False]
    assert repeated([], 8) == []


def test_empty_and_cut_answers_are_told() -> None:
    judge = LikelihoodJudge(lm(), max_tokens=40)
    (row,) = judge.measure([Question("why", ("", "word " * 30, "fine"))])
    assert row is not None
    assert row[0]["logprob"] is None
    assert row[1]["cut"] > 0
    assert judge.qualities([row])[0][0] is None
    found = judge.compare([Comparison("why", "", "fine"), Comparison("why", "", "")])
    assert [(v.winner, v.confidence) for v in found if v is not None] == [("b", 1), ("tie", 0)]


def test_an_answer_that_does_not_fit_is_no_shorter_for_it() -> None:
    """Else it would pay for leaving out what the judge itself could not read."""
    long = "abcdefghij klmnopqrstuvwxyz 0123456789 the quick brown fox"
    size = len(lm().encode(lm().chat("why"))) + 8
    judge = LikelihoodJudge(lm(), max_tokens=size)
    (row,) = judge.measure([Question("why", (long, "other ones"), {"baseline": long})])
    assert row is not None
    assert row[0]["num_tokens"] == 8
    assert row[0]["num_tokens"] + row[0]["cut"] == row[0]["against"]
    (held,) = judge.qualities([row])
    (free,) = judge.qualities([[{**measure, "against": None} for measure in row]])
    assert held[0] == free[0]
    (found,) = judge.compare([Comparison("why", long, long + "!")])
    assert found is not None
    assert abs(found.details["brevity"]) < 0.1


def test_a_prompt_that_leaves_no_room_gets_no_verdict() -> None:
    judge = LikelihoodJudge(lm(), max_tokens=4)
    pairs = [("one", "two"), ("", "two"), ("", "")]
    found = judge.compare([Comparison("a rather long prompt", a, b) for a, b in pairs])
    assert [None if v is None else v.winner for v in found] == [None, "b", "tie"]
    (row,) = judge.measure([Question("a rather long prompt", ("one", "two"))])
    assert row is not None
    assert judge.qualities([row]) == [[None, None]]
    assert all(measure["cut"] for measure in row)


def test_qualities_are_standardised_within_each_prompt() -> None:
    judge = LikelihoodJudge(lm())
    questions = [Question(p, ("a b", "c d e f", "zz top", "no")) for p in ("one", "two")]
    rows = [r for r in judge.measure(questions) if r is not None]
    for found in judge.qualities(rows):
        values = [v for v in found if v is not None]
        assert sum(values) == pytest.approx(0, abs=1e-6)
        assert sum(v * v for v in values) == pytest.approx(4)


def test_compare_turns_with_its_sides() -> None:
    judge = LikelihoodJudge(lm())
    pairs = [("some words", "other words here"), ("x y z", "q"), ("hello there", "good day")]
    there = judge.compare([Comparison("p", a, b) for a, b in pairs])
    back = judge.compare([Comparison("p", b, a) for a, b in pairs])
    for verdict, mirrored in zip(there, back, strict=True):
        assert verdict is not None
        assert mirrored is not None
        assert verdict.preference == pytest.approx(-mirrored.preference)
        assert 0 < verdict.confidence <= 1


def test_verdicts_of_two_runs_come_to_one_scale() -> None:
    """What the verdicts hold is enough to say what judging all at once would have said."""
    judge = LikelihoodJudge(lm())
    texts = [("some words", "other words here"), ("x y z", "q"), ("hello there", "good day to you"),
             ("a few of them", "none"), ("sand and sea", "winter")]  # fmt: skip
    asked = [Comparison("p", a, b) for a, b in texts]
    whole = judge.compare(asked)
    parts = [*judge.compare(asked[:2]), *judge.compare(asked[2:])]
    gaps = [gap for v in parts if v is not None and (gap := Gap.of(v.details)) is not None]
    scale = Scale.of(gaps)
    told = [verdict.preference for verdict in whole if verdict is not None]
    assert [scale.preference(gap) for gap in gaps] == pytest.approx(told)
    assert [v.preference for v in parts if v is not None] != pytest.approx(told)
    older = [{k: x for k, x in v.details.items() if k != "log_length"} for v in parts if v]
    found = [Gap.of(details) for details in older]
    assert [gap.log_length for gap in found if gap] == pytest.approx([g.log_length for g in gaps])


def test_what_was_not_measured_has_no_gap() -> None:
    known = {"a": -1.0, "b": -2.0, "log_length": 0.5, "brevity": 0.0}
    assert Gap.of(known) == Gap(1.0, 0.5, 0.0)
    flat = {"a": -1.0, "b": -2.0, "gap": 1.0, "length_slope": 0.0, "brevity": 0.0}
    odd = [{"same": True}, {"empty": [True, False]}, {}, flat, known | {"b": float("nan")}]
    odd += [known | {"a": value} for value in (None, True, "0")]
    assert [Gap.of(details) for details in odd] == [None] * len(odd)


def test_a_scale_takes_length_and_spread_out() -> None:
    flat = Scale.of([Gap(3.0, 0.0, 0.0), Gap(-4.0, 0.0, 0.0)])
    assert (flat.slope, flat.spread) == (0.0, pytest.approx(math.sqrt(12.5)))
    assert flat.preference(Gap(3.0, 0.0, 1.0)) == pytest.approx(math.tanh(3 / flat.spread + 1))
    free = flat.preference(Gap(3.0, 0.0, 1.0), is_charged=False)
    assert free == pytest.approx(math.tanh(3 / flat.spread))
    long = Scale.of([Gap(2.0 * x, x, 0.0) for x in (10.0, -20.0, 30.0)])
    assert long.slope == pytest.approx(2.0, rel=0.01)
    assert Scale.of([]).preference(Gap(1.0, 0.0, 0.0)) == 0.0


def test_of_answers_as_long_the_likelier_is_better() -> None:
    judge = LikelihoodJudge(lm())
    texts = ["zqx", "xzq", "qxz"]
    assert len({len(lm().vocabulary.encode(text)) for text in texts}) == 1
    found = judge.compare([Comparison("p", a, b) for a, b in itertools.pairwise(texts)])
    for verdict in found:
        assert verdict is not None
        assert verdict.details["brevity"] == 0
        assert (verdict.preference > 0) == (verdict.details["a"] > verdict.details["b"])


def test_an_answer_that_leaves_half_out_pays_for_it() -> None:
    assert [brevity(c, 12) for c in (24, 12, 6, 4, 1, 0)] == [0, 0, -1, -2, -3, -3]
    assert brevity(1, None) == 0
    whole = "a b c d e f g h i j k l"
    judge = LikelihoodJudge(lm())
    questions = [
        Question("p", (whole, "a b c"), opponents) for opponents in ({}, {"baseline": whole})
    ]
    free, held = judge.qualities([m for m in judge.measure(questions) if m is not None])
    assert free[1] is not None
    assert held[1] is not None
    size = [len(lm().vocabulary.encode(text)) for text in (whole, "a b c")]
    assert held[0] == free[0]
    assert held[1] == pytest.approx(free[1] + max(-3, 1 - size[0] / size[1]))


def test_a_loop_is_no_longer_than_what_it_repeats() -> None:
    looping = "go on and on " * 12
    judge = LikelihoodJudge(lm())
    (row,) = judge.measure([Question("say it", ("x" * 9,), {"baseline": looping})])
    assert row is not None
    assert row[0]["against"] < len(lm().vocabulary.encode(looping)) / 2


def test_the_identity_is_that_of_the_weights() -> None:
    model = lm().model
    mark = weights_fingerprint(model)
    assert LikelihoodJudge(lm()).identity.startswith(f"likelihood:tiny-llama#{mark};")
    assert weights_fingerprint(copy.deepcopy(model).to(torch.bfloat16)) == mark
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight *= 1.01
    assert weights_fingerprint(changed) != mark
