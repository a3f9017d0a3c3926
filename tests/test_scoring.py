"""Scoring: a judge measures what it has not measured yet; qualities come from all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stretto.data.annotators import Exhausted
from stretto.data.rows import Answer, prompt_id
from stretto.data.store import Store
from stretto.errors import InvalidInput
from stretto.eval.judges import Comparison, Measure, Question, Verdict
from stretto.train.scoring import Judged, Opponent, Scoring, opponents_of, score_answers


class Lengths:
    """A judge for whom longer is better, by rank; fails or refuses on demand."""

    def __init__(self, identity: str = "lengths:m;{}", *, at_most: int = 99, not_now: str = ""):
        self.identity = identity
        self.asked: list[Question] = []
        self._at_most = at_most
        self._not_now = not_now

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure] | None]:
        for question in questions:
            if len(self.asked) >= self._at_most:
                raise Exhausted("no more; later")
            self.asked.append(question)
            if question.prompt == self._not_now:
                yield None
            else:
                yield [{"length": len(text)} for text in question.candidates]

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        largest = max((m["length"] for row in measured for m in row), default=1)
        return [[m["length"] / largest for m in row] for row in measured]

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        return []

    def close(self) -> None:
        pass


def answer(prompt: str, sample: int, text: str, **changes: Any) -> Answer:
    values = {
        "prompt_id": prompt_id(prompt), "sample": sample, "prompt": prompt, "text": text,
        "finish_reason": "stop", "ids": [1, 2], "origins": "ss", "num_prompt_tokens": 3,
        "sequential_steps": 10, "completion_tokens": 12, "control_tokens": 4,
    }  # fmt: skip
    return Answer(**(values | changes))


ANSWERS = [answer(p, k, text) for p in "pq" for k, text in enumerate(("a", "bbb", "cccccc"))]
OPPONENTS = {prompt_id(p): Opponent("base", 30, "ref") for p in "pq"}


def run(judge: Lengths, folder: Path, answers: Sequence[Answer] = ANSWERS) -> Scoring:
    with Store(folder / "judged.jsonl", Judged) as judged:
        return score_answers(
            answers, OPPONENTS, judge, judged, prompt_of=lambda a: a.prompt or "", control={}
        )


def test_rows_hold_all_that_a_score_follows_from(tmp_path: Path) -> None:
    found = run(Lengths(), tmp_path)
    row = found.rows[1]
    assert (row.speed.speedup, row.speed.parallelism) == (3.0, 1.2)
    assert (row.quality, row.judge, row.measure) == (0.5, "lengths:m;{}", {"length": 3})
    assert found.to_json()["scored"] == 6


def test_a_judge_sees_the_baseline_and_the_reference(tmp_path: Path) -> None:
    judge = Lengths()
    run(judge, tmp_path)
    assert [q.prompt for q in judge.asked] == ["p", "q"]
    assert judge.asked[0].opponents == {"baseline": "base", "reference": "ref"}
    assert judge.asked[0].candidates == ("a", "bbb", "cccccc")


def test_what_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    with pytest.raises(Exhausted):
        run(Lengths(at_most=1), tmp_path)
    judge = Lengths()
    found = run(judge, tmp_path)
    assert [q.prompt for q in judge.asked] == ["q"]
    assert (found.num_judged_before, found.num_judged) == (3, 3)
    assert [r.quality for r in found.rows] == [r.quality for r in run(Lengths(), tmp_path).rows]


def test_new_samples_of_a_judged_prompt_are_judged_alone(tmp_path: Path) -> None:
    run(Lengths(), tmp_path)
    judge = Lengths()
    found = run(judge, tmp_path, [*ANSWERS, answer("p", 3, "d" * 12)])
    assert [q.candidates for q in judge.asked] == [("d" * 12,)]
    assert found.rows[0].quality == pytest.approx(1 / 12)  # qualities are of all of them


def test_what_cannot_be_judged_now_is_named_and_comes_later(tmp_path: Path) -> None:
    found = run(Lengths(not_now="p"), tmp_path)
    assert found.unjudged == [a.key for a in ANSWERS[:3]]
    assert {row.prompt_id for row in found.rows} == {prompt_id("q")}
    judge = Lengths()
    assert len(run(judge, tmp_path).rows) == 6
    assert [q.prompt for q in judge.asked] == ["p"]


def test_another_judge_text_or_baseline_is_not_taken_for_the_same(tmp_path: Path) -> None:
    run(Lengths(), tmp_path)
    with pytest.raises(InvalidInput, match="is by judge lengths:m"):
        run(Lengths("lengths:n;{}"), tmp_path)
    with pytest.raises(InvalidInput, match="judged another text"):
        run(Lengths(), tmp_path, [answer("p", 0, "changed")])


def test_prompts_without_a_baseline_are_named(tmp_path: Path) -> None:
    found = run(Lengths(), tmp_path, [*ANSWERS, answer("other", 0, "x")])
    assert found.no_baseline == [prompt_id("other")]
    assert len(found.rows) == 6


def test_prompts_without_any_quality_are_named(tmp_path: Path) -> None:
    class Picky(Lengths):
        def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
            first, second = measured
            return [[None for _ in first], [None, *(1.0 for _ in second[1:])]]

    found = run(Picky(), tmp_path)
    assert found.unrated == [prompt_id("p")]
    assert (found.to_json()["unrated"], found.to_json()["no_quality"]) == (1, 4)


def test_without_a_judge_there_is_speed_alone() -> None:
    found = score_answers(ANSWERS, OPPONENTS, None, None, prompt_of=str, control={})
    assert [row.quality for row in found.rows] == [None] * 6
    assert found.rows[0].judge is None
    assert found.unrated == []


def test_branches_are_counted_and_so_are_redundant_ones() -> None:
    control = {
        "promise": 7,
        "tokens": 8,
        "promise_end": 9,
        "async": 10,
        "async_end": 11,
        "sync": 12,
    }
    branch = [7, 1, 8, 2, 9, 10, 3, 4, 5, 6, 11]
    made = answer("p", 0, "x", ids=[*branch, *branch, 12], origins="s" * 23)
    (row,) = score_answers([made], OPPONENTS, None, None, prompt_of=str, control=control).rows
    assert (row.branches, row.redundant, row.flaws) == (2, 1, [])


def test_the_baseline_is_its_first_sample_that_has_tokens() -> None:
    several = [
        answer("p", 2, "third"),
        answer("p", 1, "second", completion_tokens=50),
        answer("p", 0, "", completion_tokens=0),
    ]
    found = opponents_of(several, {prompt_id("p"): "ref"})
    assert found[prompt_id("p")] == Opponent("second", 50, "ref")
    assert opponents_of(several[2:]) == {}
