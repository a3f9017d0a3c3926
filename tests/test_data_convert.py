"""Pasta rows in planned form: every token in one span, the same text, fit for training."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
from data_kit import LIST, save_tokenizer, structure, tokenizer, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cli import main
from stretto.data.check import MAX_TOPIC_WORDS, Checker
from stretto.data.convert import (
    Piece,
    PlannedForm,
    converted,
    pieces_of,
    planned_text,
    topic_of,
)
from stretto.data.markup import chunks_of, stripped
from stretto.data.rows import Annotated, Reject, prompt_id, read_rows
from stretto.dialects.planned import PLANNED_FORMS
from stretto.eval.multipart import multipart_rows
from stretto.tokens import HFVocabulary, find_control_tokens

WORDS = ["Sleep", "water", "\n\n", " the", " every day,", "meals. ", "a walk of half an hour ", " "]


@cache
def checker() -> Checker:
    backend = tokenizer()
    control = find_control_tokens(backend, PLANNED_FORMS)
    vocabulary = HFVocabulary(
        backend,
        control=control,
        forms=PLANNED_FORMS,
        size=max(control.values()) + 1,
        end_ids=frozenset({backend.token_to_id("<|im_end|>")}),
    )
    return Checker(vocabulary, dialect="planned")


def pasta_row(annotated: str, sample: int = 0) -> Annotated:
    return Annotated(
        prompt_id=prompt_id("Why?"), sample=sample, prompt="Why?", response=stripped(annotated),
        annotated=annotated, annotator="test", details={"by": "hand"},
    )  # fmt: skip


def promise(topic: str, text: str) -> str:
    return f'<promise topic="{topic}" tokens="10"/><async>{text}</async>'


def random_text(seed: int) -> str:
    rng, parts = random.Random(seed), []
    for _ in range(rng.randrange(1, 9)):
        text = "".join(rng.choices(WORDS, k=rng.randrange(1, 7)))
        kind = rng.random()
        topic = " ".join(
            rng.choices(["water", "the", "of", "Sleep", "step 15"], k=rng.randrange(5))
        )
        parts.append("<sync/>" if kind < 0.2 else promise(topic, text) if kind < 0.6 else text)
    return "".join(parts)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), topics=st.booleans(), rounds=st.booleans())
def test_every_token_stands_in_one_span_and_the_text_is_the_same(
    seed: int, topics: bool, rounds: bool
) -> None:
    row = pasta_row(random_text(seed))
    if not row.response.strip():
        return
    made = converted(row, checker(), PlannedForm(topics=topics, rounds=rounds))
    assert isinstance(made, Annotated), made
    assert stripped(made.annotated) == made.response == row.response
    trace = checker().parse(made.annotated).trace
    assert all(m for s in trace.response if s.kind == "causal" for m in s.markup)
    for chunk in chunks_of(made.annotated):
        size = checker().count(chunk.content or "")
        assert (chunk.content or "").strip()
        assert 0 <= chunk.tokens - size < 10
        assert len(chunk.topic.split()) <= (MAX_TOPIC_WORDS if topics else 0)
    assert ("<sync/>" in made.annotated) <= rounds
    assert not made.annotated.endswith("<sync/>")
    assert made.details["by"] == "hand"


def test_what_main_says_becomes_spans_and_short_text_joins_its_neighbour() -> None:
    long = "In conclusion, start with the one that is easiest for you."
    text = (
        f"Two:\n\n{promise('sleep', 'Go to bed.')}\n\n{promise('the water of life', 'Drink.')} So"
        f"<sync/>\n\n<sync/>{long}<sync/>\n"
    )
    rounds = pieces_of(text, checker().count, 10)
    assert rounds == [
        [Piece("Two:\n\nGo to bed.", "sleep"), Piece("\n\nDrink. So\n\n", "the water of life")],
        [Piece(f"{long}\n")],
    ]
    count = checker().count
    assert [topic_of(piece, count) for pieces in rounds for piece in pieces] == [
        "sleep", "water life", "conclusion start one"
    ]  # fmt: skip
    assert planned_text([[Piece("ab", "x")]], lambda _: 13, PlannedForm()).startswith(
        '<promise topic="x" tokens="20"/><async>ab</async>'
    )
    assert pieces_of("\n<sync/>a", lambda _: 1, 10) == [[Piece("\na")]]
    assert pieces_of("", lambda _: 0, 10) == []


def test_topics_never_hold_a_quote_or_too_many_tokens() -> None:
    assert topic_of(Piece("x", 'say "yes" to it'), lambda text: 1) == "say yes"
    assert topic_of(Piece("a" * 90), lambda text: 1) == "a" * 24
    assert not topic_of(Piece("one two three"), lambda text: 99)
    assert not topic_of(Piece("…\n", ""), len).strip("…")


def test_rows_are_converted_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tok")
    good = pasta_row(structure().annotate("", LIST).text)
    bad = pasta_row(promise("a", "leave [PAD] out"), sample=1)
    write_rows(tmp_path / "rows.jsonl", [r.model_dump(exclude_none=True) for r in (good, bad)])
    command = ["data", "convert", "rows.jsonl", "--to", "planned", "--tokenizer", "tok", "--json"]
    assert main([*command, "--out", "planned.jsonl", "--quiet"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "rows": 1, "rejected": {"text-differs": 1}, "spans": 4, "rounds": 2,
        "file": "planned.jsonl",
    }  # fmt: skip
    (reject,) = read_rows(tmp_path / "planned.jsonl.rejects.jsonl", Reject)
    assert reject.key == bad.key
    (row,) = read_rows(tmp_path / "planned.jsonl", Annotated)
    assert (row.prompt, row.response) == ("Why?", LIST)
    assert [c.topic for c in chunks_of(row.annotated)][:2] == ["1. Sleep", "2. Water"]
    check = ["data", "check", "planned.jsonl", "--dialect", "planned", "--tokenizer", "tok"]
    assert main(check) == 0
    assert main([*command, "--out", "b.jsonl", "--no-topics", "--one-round", "--no-prompts"]) == 3
    (row,) = read_rows(tmp_path / "b.jsonl", Annotated)
    assert row.prompt is None
    assert "<sync/>" not in row.annotated
    assert {c.topic for c in chunks_of(row.annotated)} == {""}
    capsys.readouterr()
    assert main([*command[:4], "apar", "--out", "c.jsonl"]) == 2
    assert "known: planned" in capsys.readouterr().err
    assert main([*command, "rows.jsonl", "--out", "c.jsonl"]) == 2
    assert "again; give each row once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "response", "annotated"),
    [
        ("topic-too-long", "ab", promise("four words are many", "ab")),
        ("topic-with-quote", "ab", '<promise topic=\'a "b"\' tokens="10"/><async>ab</async>'),
        ("empty-chunk", " ab", promise("x", " ") + promise("y", "ab")),
        ("span-too-long", "a b " * 12, promise("x", "a b " * 12)),
        ("text-outside-span", "ab", "a" + promise("x", "b")),
    ],
)
def test_rows_of_others_are_held_to_the_same_rules(
    code: str, response: str, annotated: str
) -> None:
    (reason,) = checker().reasons(response, annotated)
    assert reason.startswith(f"{code}: ")


def test_multipart_problems_have_a_planned_form() -> None:
    for value in multipart_rows(0, 3, count_tokens=checker().count, planned=True):
        row = Annotated.model_validate(value)
        assert checker().reasons(row.response, row.annotated) == []
        chunks = chunks_of(row.annotated)
        assert [c.topic for c in chunks][-2:] == [f"part {len(chunks) - 1}", "the sum"]
        assert row.annotated.count("<sync/>") == 1
