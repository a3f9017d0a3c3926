"""From sampled answers to `Scored` rows: a judge measures what it has not measured yet, then all
measurements together become qualities. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from stretto.data.rows import Answer, Row
from stretto.data.store import Store
from stretto.errors import InvalidInput
from stretto.eval.judges.base import Judge, Question
from stretto.train.pairs import Scored
from stretto.train.scores import branches_of, flaws_of, redundant_branches

BASELINE, REFERENCE = "baseline", "reference"


class Judged(Row):
    """What a judge measured of an answer. `about`: a hash of the texts it saw, so that an answer
    sampled anew is not taken for the one that was judged."""

    kind: ClassVar[str] = "judged"
    prompt_id: str
    sample: int
    judge: str
    about: str
    measure: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.prompt_id}/{self.sample}"


@dataclass(frozen=True)
class Opponent:
    """What a prompt's candidates are held against: the sequential baseline's answer, whose number
    of tokens the speedup is counted from, and the reference answer of the data, if there is one."""

    text: str
    num_tokens: int
    reference: str | None = None

    @property
    def texts(self) -> dict[str, str]:
        other = {} if self.reference is None else {REFERENCE: self.reference}
        return {BASELINE: self.text, **other}


@dataclass
class Scoring:
    """What a run of scoring came to. `unjudged`: answers a later run of the same command judges;
    `no_baseline`: prompts that cannot be scored, since the baseline has no answer to them, or an
    empty one."""

    rows: list[Scored] = field(default_factory=list)
    num_judged_before: int = 0
    num_judged: int = 0
    unjudged: list[str] = field(default_factory=list)
    no_baseline: list[str] = field(default_factory=list)

    @property
    def unrated(self) -> list[str]:
        """Prompts none of whose answers has a quality from the judge that measured them, such as
        those without a reference."""
        judged = [row for row in self.rows if row.judge is not None]
        rated = {row.prompt_id for row in judged if row.quality is not None}
        return sorted({row.prompt_id for row in judged} - rated)

    def to_json(self) -> dict[str, Any]:
        rows, flaws = self.rows, [flaw for row in self.rows for flaw in row.flaws]
        return {
            "scored": len(rows),
            "judged_before": self.num_judged_before,
            "judged": self.num_judged,
            "unjudged": len(self.unjudged),
            "no_baseline": len(self.no_baseline),
            "no_quality": sum(row.judge is not None and row.quality is None for row in rows),
            "unrated": len(self.unrated),
            "flaws": {flaw: flaws.count(flaw) for flaw in sorted(set(flaws))},
            "with_branches": sum(row.branches > 0 for row in rows),
            "branches": sum(row.branches for row in rows),
            "redundant": sum(row.redundant for row in rows),
        }


def opponents_of(
    baseline: Sequence[Answer], references: Mapping[str, str] | None = None
) -> dict[str, Opponent]:
    """Opponents by `prompt_id`: of several baseline answers to a prompt that of the lowest sample
    number. One without a token is none: nothing can be held against it."""
    found: dict[str, Opponent] = {}
    for answer in sorted(baseline, key=lambda a: a.sample, reverse=True):
        if answer.completion_tokens:
            reference = (references or {}).get(answer.prompt_id)
            found[answer.prompt_id] = Opponent(answer.text, answer.completion_tokens, reference)
    return found


def score_answers(
    answers: Sequence[Answer],
    opponents: Mapping[str, Opponent],
    judge: Judge | None,
    judged: Store[Judged] | None,
    *,
    prompt_of: Callable[[Answer], str],
    control: Mapping[str, int],
    report: Callable[[int, int], None] | None = None,
) -> Scoring:
    """Scores all answers that can be scored; measurements go to `judged` as they come.

    Without a judge there are no qualities. `control`: the control ids of the model that sampled.
    `report` is told how many answers are judged, and of how many. Raises what the judge raises,
    with all that it measured before on disk.
    """
    known = [a for a in answers if a.prompt_id in opponents]
    found = Scoring(no_baseline=sorted({a.prompt_id for a in answers} - set(opponents)))
    if judge is None or judged is None:
        found.rows = [_row(a, opponents[a.prompt_id], control) for a in known]
        return found
    left = _left(known, opponents, judge, judged)
    found.num_judged_before = len(known) - sum(map(len, left))
    questions = [_question(group, opponents[group[0].prompt_id], prompt_of) for group in left]
    for group, measures in zip(left, judge.measure(questions), strict=True):
        if measures is None:
            found.unjudged += [a.key for a in group]
            continue
        rows = [
            Judged(
                prompt_id=answer.prompt_id, sample=answer.sample, judge=judge.identity,
                about=about_of(answer, opponents[answer.prompt_id]), measure=measure,
            )
            for answer, measure in zip(group, measures, strict=True)
        ]  # fmt: skip
        judged.add(*rows)  # at once: which are measured together shows in the last digits
        found.num_judged += len(group)
        if report is not None:
            report(found.num_judged_before + found.num_judged, len(known))
    found.rows = list(_with_qualities(known, opponents, judge, judged, control))
    return found


def about_of(answer: Answer, opponent: Opponent) -> str:
    """A hash of the texts that a measurement of `answer` is about."""
    texts = json.dumps([answer.text, opponent.texts], sort_keys=True)
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def _left(
    answers: Sequence[Answer], opponents: Mapping[str, Opponent], judge: Judge,
    judged: Store[Judged],
) -> list[list[Answer]]:  # fmt: skip
    """The answers that are not judged yet, by prompt. Raises `InvalidInput` for one that was
    judged by another judge, or when its text was another."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        row = judged.rows.get(answer.key)
        if row is None:
            groups.setdefault(answer.prompt_id, []).append(answer)
            continue
        if row.judge != judge.identity:
            raise InvalidInput(
                f"{judged.path} is by judge {row.judge}, not {judge.identity}; name another file"
            )
        if row.about != about_of(answer, opponents[answer.prompt_id]):
            raise InvalidInput(
                f"{judged.path} judged another text of answer {answer.key}, or against another "
                "baseline; name another file"
            )
    return list(groups.values())


def _question(
    group: Sequence[Answer], opponent: Opponent, prompt_of: Callable[[Answer], str]
) -> Question:
    return Question(prompt_of(group[0]), tuple(a.text for a in group), opponent.texts)


def _with_qualities(
    answers: Sequence[Answer], opponents: Mapping[str, Opponent], judge: Judge,
    judged: Store[Judged], control: Mapping[str, int],
) -> Iterator[Scored]:  # fmt: skip
    """Rows of the answers that are judged, qualities being computed from all of them."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.key in judged:
            groups.setdefault(answer.prompt_id, []).append(answer)
    measures = [[judged.rows[a.key].measure for a in group] for group in groups.values()]
    qualities = judge.qualities(measures)
    for group, found in zip(groups.values(), qualities, strict=True):
        for answer, quality in zip(group, found, strict=True):
            row = _row(answer, opponents[answer.prompt_id], control)
            measure = judged.rows[answer.key].measure
            yield row.model_copy(
                update={"quality": quality, "judge": judge.identity, "measure": measure}
            )


def _row(answer: Answer, opponent: Opponent, control: Mapping[str, int]) -> Scored:
    branches = branches_of(answer.ids, control)
    return Scored(
        prompt_id=answer.prompt_id,
        sample=answer.sample,
        baseline_tokens=opponent.num_tokens,
        text_tokens=answer.completion_tokens,
        control_tokens=answer.control_tokens,
        steps=answer.sequential_steps,
        branches=len(branches),
        redundant=len(redundant_branches(branches)),
        flaws=flaws_of(answer, control),
    )
