"""Preference training: the log-probs it sees, its objective, its reference, its loop."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import forking_answers, forking_lm

from stretto import LM
from stretto.data.rows import Answer
from stretto.errors import InvalidInput
from stretto.eval.judges import judges_of
from stretto.train.batches import Batch
from stretto.train.bonbon import margin_of
from stretto.train.examples import ExampleMaker
from stretto.train.logprobs import sequence_logprobs, token_logprobs
from stretto.train.pairs import Pair, make_pairs
from stretto.train.prefer import (
    PairExample,
    Preference,
    pair_examples,
    recorded_logprob,
    reference_logprobs,
)
from stretto.train.prefer_run import (
    Hooks,
    Learner,
    PreferSettings,
    Trained,
    train_on_pairs,
    write_preference,
)
from stretto.train.schedule import Schedule
from stretto.train.scores import UNUSABLE, flaws_of
from stretto.train.scoring import Opponent, score_answers
from stretto.train.targets import CLASSES
from stretto.train.workers import Workers

PROMPTS = ("one two", "three", "four five six", "seven")


@cache
def lm() -> LM:
    return forking_lm()


@cache
def answers() -> tuple[Answer, ...]:
    return tuple(forking_answers(lm(), PROMPTS, 6))


@cache
def maker() -> ExampleMaker:
    return ExampleMaker(lm().vocabulary, lm().card, lm().engine.max_positions)


def prompt_ids(answer: Answer) -> list[int]:
    assert answer.prompt is not None
    return lm().encode(lm().chat(answer.prompt))


@cache
def pairs() -> tuple[Pair, ...]:
    opponents = {a.prompt_id: Opponent("base", 40) for a in answers()}
    control = lm().vocabulary.control
    found = score_answers(answers(), opponents, None, None, prompt_of=str, control=control)
    return tuple(make_pairs(found.rows, lam=0))


@cache
def examples() -> tuple[PairExample, ...]:
    made, unusable = pair_examples(pairs(), answers(), maker(), prompt_ids)
    assert not unusable
    return tuple(made)


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(lm().model)


def flat(made: Sequence[PairExample]) -> list[Any]:
    return [example for pair in made for example in (pair.best, pair.worst)]


def reference(model: Any, folder: Path, made: Sequence[PairExample]) -> dict[str, float]:
    rows = reference_logprobs(
        model, flat(made), folder / "reference.jsonl", identity={"model": "m"}, pack_tokens=400
    )
    return {key: row.logprob for key, row in rows.items()}


# -- what was sampled is what is trained on --------------------------------------------------------


def usable() -> list[Answer]:
    control = lm().vocabulary.control
    return [a for a in answers() if not UNUSABLE & set(flaws_of(a, control))]


def test_the_samples_really_fork_and_join() -> None:
    forks = [a.origins.count("i") for a in answers()]
    sync = lm().vocabulary.control["sync"]
    assert sum(n >= 2 for n in forks) >= 5
    assert any(sync in a.ids and "i" in a.origins for a in answers())


def test_teacher_forced_log_probs_are_those_the_sampler_recorded() -> None:
    """One masked pass over a whole answer against step-by-step decoding with forks, many requests
    a pass: token by token, and as the ratio of the whole answer."""
    for answer in usable():
        example = maker().from_answer(prompt_ids(answer), answer)
        batch = Batch.of([example])
        with torch.no_grad():
            tokens = token_logprobs(lm().model, batch)
        own = tokens[batch.classes != CLASSES.index("end")].tolist()
        assert answer.logprobs is not None
        drawn = [v for v, o in zip(answer.logprobs, answer.origins, strict=True) if o == "s"]
        assert len(own) == len(drawn)
        assert sorted(own) == pytest.approx(sorted(v for v in drawn if v is not None), abs=1e-4)
        known = recorded_logprob(answer)
        assert known is not None
        assert math.exp(sum(own) - known) == pytest.approx(1, abs=1e-3)


def test_injected_forced_and_prompt_tokens_are_in_no_log_prob() -> None:
    """Invariant 32: as many targets as tokens were drawn freely, and the end."""
    for answer in usable():
        example = maker().from_answer(prompt_ids(answer), answer)
        ended = answer.finish_reason == "stop"
        assert example.num_targets == answer.origins.count("s") + ended
        assert example.num_illegal == 0


def test_log_probs_are_sums_that_do_not_depend_on_the_batch(model: Any) -> None:
    made = flat(examples())
    with torch.no_grad():
        together = sequence_logprobs(model, Batch.of(made))
        alone = torch.cat([sequence_logprobs(model, Batch.of([e])) for e in made])
        tokens = token_logprobs(model, Batch.of(made[:1]))
    assert torch.allclose(together, alone, atol=1e-3)
    assert float(tokens.sum()) == pytest.approx(float(alone[0]), abs=1e-4)


# -- pairs -----------------------------------------------------------------------------------------


def test_a_pairs_margin_is_that_of_its_candidates() -> None:
    by_prompt = {p.prompt_id: p for p in pairs()}
    for pair in examples():
        candidates = by_prompt[pair.best.key.partition("/")[0]].num_candidates
        assert pair.margin == margin_of(candidates)
    fixed, _ = pair_examples(pairs(), answers(), maker(), prompt_ids, margin=3.0)
    assert {pair.margin for pair in fixed} == {3.0}


def test_answers_that_are_missing_are_named() -> None:
    with pytest.raises(InvalidInput, match="is in no file of answers"):
        pair_examples(pairs(), answers()[:3], maker(), prompt_ids)


def test_a_pair_of_another_chat_template_is_left_out_and_told() -> None:
    made, unusable = pair_examples(pairs(), answers(), maker(), lambda a: [1, 2, 3])
    assert made == []
    assert len(unusable) == len(examples())
    assert "another tokenizer or chat template" in unusable[0].reason


def test_a_prompt_that_is_not_to_be_had_is_no_pair_left_out() -> None:
    def book(answer: Answer) -> list[int]:
        raise InvalidInput("prompt x is in no file given; name the data")

    with pytest.raises(InvalidInput, match="in no file given"):
        pair_examples(pairs(), answers(), maker(), book)


# -- the objective ---------------------------------------------------------------------------------


def test_before_the_first_step_the_ipo_term_is_the_margin_squared(
    model: Any, tmp_path: Path
) -> None:
    made = examples()
    objective = Preference(made, reference(model, tmp_path, made), alpha=0.0)
    outcome = objective.outcome(model, objective.batch(tuple(range(len(made)))))
    expected = sum(pair.margin**2 for pair in made)
    assert float(outcome.loss.detach()) == pytest.approx(expected, rel=1e-3)
    assert outcome.num_terms == len(made)
    assert outcome.metrics["gap"][0] == pytest.approx(0, abs=1e-2)


def test_the_loss_does_not_depend_on_how_pairs_are_packed(model: Any, tmp_path: Path) -> None:
    made = examples()
    objective = Preference(made, {e.key: -30.0 for e in flat(made)}, alpha=0.3)
    packs: list[list[tuple[int, ...]]] = [[(0, 1, 2)], [(2,), (0, 1)]]
    totals = [
        sum(float(objective.outcome(model, objective.batch(p)).loss.detach()) for p in several)
        for several in packs
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-4)


def test_alpha_one_has_the_gradient_of_supervised_training_on_the_best(model: Any) -> None:
    made = examples()[:1]
    objective = Preference(made, {e.key: 0.0 for e in flat(made)}, alpha=1.0)
    objective.outcome(model, objective.batch((0,))).loss.backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (-sequence_logprobs(model, Batch.of([made[0].best])).sum()).backward()
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad, atol=1e-4)


# -- the reference ---------------------------------------------------------------------------------


def test_reference_log_probs_are_computed_once_and_are_those_of_the_sampler(
    model: Any, tmp_path: Path
) -> None:
    recorded = {a.key: v for a in answers() if (v := recorded_logprob(a)) is not None}
    made, calls = flat(examples()), []
    options: dict[str, Any] = {"identity": {"model": "m"}, "pack_tokens": 300}
    path = tmp_path / "reference.jsonl"

    def compute(report: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        return reference_logprobs(model, made, path, recorded=recorded, report=report, **options)

    first = compute(lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len({e.key for e in made}),) * 2
    assert all(abs(row.drift) < 1e-3 for row in first.values())
    with torch.no_grad():
        model.lm_head.weight.zero_()  # nothing is computed again
    assert compute(lambda done, total: pytest.fail("computed again")) == first
    with pytest.raises(InvalidInput, match="was begun with model"):
        reference_logprobs(model, made, path, identity={"model": "n"}, pack_tokens=300)


def test_a_torn_file_of_references_is_completed(model: Any, tmp_path: Path) -> None:
    made = examples()
    whole = reference(model, tmp_path, made)
    path = tmp_path / "reference.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    assert reference(model, tmp_path, made) == pytest.approx(whole, abs=1e-3)
    assert path.read_bytes().count(b"\n") == len(whole)


# -- a round's training ----------------------------------------------------------------------------


def train(
    model: Any, folder: Path, *, num_steps: int = 7, stop_at: int | None = None, **changes: Any
) -> Trained:
    learner = Learner(model, maker(), prompt_ids, {"model": "m"}, Workers())
    settings: dict[str, Any] = {
        "schedule": Schedule(3e-4, "constant"), "pairs_per_step": 2, "pack_tokens": 600,
        "epochs": 99, "max_steps": num_steps, "max_grad_norm": 10.0, "checkpoint_every": 3,
    }  # fmt: skip
    seen: list[int] = []

    def should_stop() -> bool:
        seen.append(1)
        return stop_at is not None and len(seen) > stop_at

    return train_on_pairs(
        learner,
        pairs(),
        answers(),
        folder,
        PreferSettings(**settings | changes),
        hooks=Hooks(should_stop=should_stop),
    )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_training_widens_the_gap_towards_the_margin(model: Any, tmp_path: Path) -> None:
    made = examples()
    found = train(model, tmp_path, num_steps=25)
    objective = Preference(made, reference(lm().model, tmp_path / "again", made))
    outcome = objective.outcome(model.eval(), objective.batch(tuple(range(len(made)))))
    gap = outcome.metrics["gap"][0] / len(made)
    margin = sum(p.margin for p in made) / len(made)
    assert found.finished.is_complete
    assert 0.5 * margin < gap < 1.5 * margin
    assert found.drift is not None
    assert found.drift < 1e-3
    assert found.drifted == 0
    assert found.to_json()["trained_pairs"] == len(made)


def test_the_first_step_begins_at_the_reference_whatever_the_dropout(
    model: Any, tmp_path: Path
) -> None:
    mlp = model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.5), mlp.down_proj)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    train(model, tmp_path, num_steps=1)
    (line,) = lines_of(tmp_path)
    assert line["gap"] == pytest.approx(0, abs=1e-2)


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(model: Any, tmp_path: Path) -> None:
    """The reference stays that of the start, though the model has moved on."""
    other, again = copy.deepcopy(model), copy.deepcopy(model)
    train(model, tmp_path / "whole")
    assert not train(other, tmp_path / "parts", stop_at=4).finished.is_complete
    assert train(again, tmp_path / "parts").finished.is_complete
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "parts")


def test_references_of_several_processes_are_read_together(model: Any, tmp_path: Path) -> None:
    """Of the files that two processes left, one torn by a kill; only what is lost is computed."""
    train(model, tmp_path / "one", num_steps=1)
    lines = (tmp_path / "one" / "reference.jsonl").read_bytes().splitlines(keepends=True)
    other = tmp_path / "two"
    other.mkdir()
    (other / "reference.jsonl").write_bytes(b"".join(lines[:3]))
    (other / "reference.1.jsonl").write_bytes(b"".join(lines[3:])[:-9])
    train(copy.deepcopy(lm().model), other, num_steps=1)
    losses = [lines_of(folder)[0]["loss"] for folder in (other, tmp_path / "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    kept = (other / "reference.jsonl").read_bytes().splitlines(keepends=True)
    assert len(kept) == 4
    assert json.loads(kept[3])["id"] == json.loads(lines[-1])["id"]


def test_answers_of_another_model_are_noticed(model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7)  # what a higher temperature would have sampled
    found = train(model, tmp_path, num_steps=1)
    assert found.drifted > len(examples()) / 2
    assert found.drift is not None
    assert found.drift > 3


def test_a_folder_of_another_run_is_refused(model: Any, tmp_path: Path) -> None:
    train(model, tmp_path, num_steps=1)
    with pytest.raises(InvalidInput, match="other settings or data"):
        train(copy.deepcopy(lm().model), tmp_path, num_steps=1, alpha=0.5)


def test_references_of_other_answers_are_not_taken(model: Any, tmp_path: Path) -> None:
    """Answers sampled anew under the same names; only the worse one of a pair differs."""
    train(model, tmp_path, num_steps=1)
    worst = examples()[0].worst.key
    short = next(a for a in answers() if a.key == worst)
    given = [
        a.model_copy(update={"finish_reason": "length"}) if a is short else a for a in answers()
    ]
    learner = Learner(copy.deepcopy(lm().model), maker(), prompt_ids, {"model": "m"}, Workers())
    with pytest.raises(InvalidInput, match="was begun with answers"):
        train_on_pairs(learner, pairs(), given, tmp_path, PreferSettings(Schedule(1e-4)))


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_that_not_every_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(InvalidInput, match="seed must be at"):
        PreferSettings(Schedule(1e-4), seed=seed)


def test_pairs_that_cannot_be_used_are_kept_with_their_reason(model: Any, tmp_path: Path) -> None:
    learner = Learner(model, maker(), lambda answer: [1, 2], {"model": "m"}, Workers())
    settings = PreferSettings(Schedule(1e-4), max_steps=1)
    told = r"none of 4 prompts has a pair .*4 unusable.*another tokenizer"
    with pytest.raises(InvalidInput, match=told):
        train_on_pairs(learner, pairs(), answers(), tmp_path / "none", settings)
    good = Learner(model, maker(), prompt_ids, {"model": "m"}, Workers())
    bad = pairs()[1].prompt_id
    given = [
        a.model_copy(update={"num_prompt_tokens": 1}) if a.prompt_id == bad else a
        for a in answers()
    ]
    skipped = pairs()[0].model_copy(update={"best": None, "worst": None, "skipped": "tie"})
    found = train_on_pairs(good, [skipped, *pairs()[1:]], given, tmp_path / "some", settings)
    assert found.num_pairs == len(examples()) - 2
    rows = [json.loads(x) for x in (tmp_path / "some" / "unusable.jsonl").read_text().splitlines()]
    assert [row["prompt_id"] for row in rows] == [bad]


def test_a_trained_folder_says_who_scored_what_it_learnt_from(tmp_path: Path) -> None:
    scored = [p.model_copy(update={"judge": "llm:m;{}"}) for p in pairs()]
    write_preference(tmp_path, before=["likelihood:a;{}", "llm:m;{}"], pairs=scored)
    assert judges_of(tmp_path) == ["likelihood:a;{}", "llm:m;{}"]
    write_preference(tmp_path, before=[], pairs=pairs())  # lambda 0: nobody had a say
    assert judges_of(tmp_path) == []
