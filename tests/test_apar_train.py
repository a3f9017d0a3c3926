"""Dialect apar in training: one masked pass trains main and every child, ends included."""

from __future__ import annotations

import re

import pytest
import torch
from apar_words import CHILD, EOS, FORK, VOCABULARY, A, B
from test_apar_session import forced
from tiny_lms import tiny_lm

from stretto import LM, SamplingParams
from stretto.data.apar_rules import AparRules
from stretto.data.check import Checker
from stretto.runtime.events import Token
from stretto.tokens import ModelCard
from stretto.train.batches import Batch
from stretto.train.examples import IGNORE, Example, ExampleMaker
from stretto.train.logprobs import sequence_logprobs, token_logprobs
from stretto.train.targets import CLASSES

LIST = (
    "1. Eat: a warm meal at noon.\n2. Sleep: eight hours in the dark.\n"
    "3. Move: half an hour a day.\n\nBe well."
)


def maker() -> ExampleMaker:
    card = ModelCard(dialect="apar", control=dict(VOCABULARY.control))
    return ExampleMaker(VOCABULARY, card, 512)


def targets(example: Example) -> list[int | None]:
    return [None if t == IGNORE else t for t in example.targets.tolist()]


def test_every_thread_learns_to_end_and_no_child_learns_to_begin() -> None:
    example = maker().from_annotated(
        [A, B], " a<fork/><child> b b</child> a<fork/><child></child> b"
    )
    assert example.ids.tolist() == [A, B, A, FORK, CHILD, B, B, A, FORK, CHILD, B]
    assert targets(example) == [None, A, FORK, A, B, B, EOS, FORK, B, EOS, EOS]
    assert example.num_illegal == 0
    names = [CLASSES[c] for c in example.classes.tolist() if c >= 0]
    assert names == [
        "content", "control", "content", "content", "content", "close", "control", "content",
        "close", "end",
    ]  # fmt: skip


def test_targets_stand_under_the_masks_of_decoding() -> None:
    made = maker()
    example = made.from_annotated([A], " a<fork/><child> b</child> a")
    legal = made.table.dense(example.legal.tolist(), VOCABULARY.size)
    can_fork = legal[:, FORK].tolist()
    # Rows: prompt, a, fork, child, b, a.
    assert [can_fork[i] for i in range(6)] == [True, True, False, False, False, True]
    assert not legal[:, CHILD].any()
    assert legal[:, EOS].all()


def test_more_forks_than_threads_may_be_open_are_all_trained() -> None:
    """A thread is over where its text is: 40 forks in a row are legal."""
    example = maker().from_annotated([A], " a<fork/><child> b</child>" * 40)
    assert example.num_illegal == 0
    assert int((example.targets == EOS).sum()) == 41


def test_the_loss_is_that_of_one_sample_a_thread() -> None:
    """As published: main alone, and for each child its prefix, itself and nothing else."""
    lm = tiny_lm("apar")
    made = ExampleMaker(lm.vocabulary, lm.card, 512)
    prompt = lm.encode("Tips?")
    found = AparRules().annotate("Tips?", LIST)
    example = made.from_annotated(prompt, found.text or "")
    whole = float(sequence_logprobs(lm.model, Batch.of([example]))[0].detach())
    assert whole == pytest.approx(sum(published_samples(lm, prompt, found.text or "")), abs=1e-3)


def published_samples(lm: LM, prompt: list[int], annotated: str) -> list[float]:
    """The log-prob of each sample by plain causal passes, under the masks of decoding."""
    vocabulary, model = lm.vocabulary, lm.model
    fork, child = (vocabulary.control[name] for name in ("fork", "child"))
    end = min(vocabulary.end_ids)
    main, totals = list(prompt), []

    def logprob(ids: list[int], start: int, at_root: bool) -> float:
        logits = model(torch.tensor([ids])).logits[0].float().detach()
        total = 0.0
        for i in range(start, len(ids)):
            row = logits[i - 1].clone()
            banned = [child, *vocabulary.spare_ids]
            if not at_root or ids[i - 1] == fork:
                banned.append(fork)
            empty = [t for t in range(vocabulary.size) if not vocabulary.decode([t])]
            row[[*banned, *empty]] = -torch.inf
            total += float(torch.log_softmax(row, -1)[ids[i]])
        return total

    for piece in re.split(r"(<fork/><child>.*?</child>)", annotated, flags=re.DOTALL):
        if piece.startswith("<fork/>"):
            main.append(fork)
            detail = vocabulary.encode(piece[len("<fork/><child>") : -len("</child>")])
            sample = [*main, child, *detail, end]
            totals.append(logprob(sample, len(main) + 1, at_root=False))
        else:
            main += vocabulary.encode(piece)
    return [*totals, logprob([*main, end], len(prompt), at_root=True)]


def test_teacher_forced_log_probs_are_those_that_were_recorded() -> None:
    lm = tiny_lm("apar")
    script = forced(lm, ["1. Eat:", "\n2. Sleep:", "\nGood."], " at noon, slowly", " at night")
    stream = lm.stream("hello", SamplingParams(max_tokens=150), script=script)
    events = [e for e in stream if isinstance(e, Token) and e.logprob is not None]
    answer = stream.completion
    made = ExampleMaker(lm.vocabulary, lm.card, 512)
    example = made.from_annotated(lm.encode(lm.chat("hello")), answer.annotated)
    assert example.ids.tolist() == [t for s in answer.trace.segments for t in s.tokens]
    batch = Batch.of([example])
    found = token_logprobs(lm.model, batch).detach()
    ends = batch.targets == made.end_id
    recorded = [e.logprob for e in events]
    assert sorted(found[~ends].tolist()) == pytest.approx(sorted(recorded), abs=1e-4)
    assert int(ends.sum()) == 3


def test_every_annotation_passes_the_check_of_data() -> None:
    lm = tiny_lm("apar")
    rules = AparRules()
    checker = Checker(lm.vocabulary, dialect="apar")
    for response in (LIST, "No structure at all."):
        found = rules.annotate("", response)
        assert found.text is not None
        assert checker.reasons(response, found.text) == []
    assert checker.reasons(LIST, LIST.replace("Eat:", "Eat:<fork/>")) != []
    many = "".join(f"{n}. Item: a detail of some length\n" for n in range(1, 41))
    found = rules.annotate("", many)
    assert found.text is not None
    assert found.text.count("<fork/>") == 40
    assert checker.reasons(many, found.text) == []
