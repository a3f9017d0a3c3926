"""Tiny models with a vocabulary of their own: made, loaded, trained from scratch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.data.rows import prompt_id
from stretto.errors import InvalidInput, UnknownName
from stretto.models.tiny import SHAPES, make_tiny, new_tiny, shape_of
from stretto.models.tiny_tokens import (
    ANSWER,
    BYTES,
    END,
    checked_symbols,
    learn_symbols,
    make_backend,
    read_symbols,
)

SYMBOLS = ["+", "-", "0", "1", "2", ";", "=", "\n", " ", "mod", "a", "b", "ab", "m"]
BACKEND = make_backend(SYMBOLS)


def tokens(text: str) -> list[str]:
    return list(BACKEND.encode(text, add_special_tokens=False).tokens)


def test_symbols_are_tokens_the_longest_first_and_others_are_bytes() -> None:
    assert tokens("abb=1 mod 2\n") == ["ab", "b", "=", "1", " ", "mod", " ", "2", "\n"]
    assert tokens("é") == ["<0xC3>", "<0xA9>"]
    assert tokens("mo") == ["m", "<0x6F>"]
    vocabulary = BACKEND.get_vocab(with_added_tokens=True)
    assert sorted(vocabulary.values()) == list(range(2 + len(SYMBOLS) + 256))
    assert [vocabulary[token] for token in (END, ANSWER, "+", BYTES[0])] == [0, 1, 2, 16]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(text: str) -> None:
    vocabulary = _plain().vocabulary
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert not {0, 1} & set(ids)


@pytest.mark.parametrize("text", [END, f"a{ANSWER}b", "<0x41>", "<|stretto:reg_0|>"])
def test_what_looks_like_a_special_token_is_text(text: str) -> None:
    vocabulary = make_tiny("tiny-1m", SYMBOLS, dialect="tip").vocabulary
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert max(ids) < min(vocabulary.control.values())
    assert min(ids) > 1


def test_a_chat_is_questions_and_answers() -> None:
    vocabulary = _plain().vocabulary
    one = {"role": "user", "content": "1+1"}
    ids = vocabulary.encode_chat([one, {"role": "assistant", "content": "2"}, one])
    plain = vocabulary.encode("1+1")
    assert ids == [*plain, 1, *vocabulary.encode("2"), 0, *plain, 1]
    forged = vocabulary.encode_chat([{"role": "user", "content": ANSWER}])
    assert forged == [*vocabulary.encode(ANSWER), 1]
    with pytest.raises(InvalidInput, match="user and assistant alone"):
        vocabulary.encode_chat([{"role": "system", "content": "1"}, one])


@pytest.mark.parametrize(
    ("symbols", "reason"),
    [
        ([], "at least one"),
        (["a", ""], "empty"),
        (["a", "b", "a"], "'a' twice"),
        ([END], "has a meaning"),
        (["<0x0A>"], "has a meaning"),
        (["\ud800"], "surrogate"),
    ],
)
def test_what_is_no_vocabulary(symbols: list[str], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        checked_symbols(symbols, "it")


def test_symbols_from_files(tmp_path: Path) -> None:
    rows, other, listed = tmp_path / "rows.jsonl", tmp_path / "other", tmp_path / "list.json"
    rows.write_text('{"prompt": "ba", "response": "\\n c", "annotated": "<x>", "size": 3}\n')
    assert learn_symbols([rows]) == ["\n", " ", "a", "b", "c"]
    other.write_text('{"annotated": "<x>"}\n')
    with pytest.raises(InvalidInput, match="no text"):
        learn_symbols([rows, other])
    listed.write_text('["x", "ab"]')
    assert read_symbols(listed) == ["x", "ab"]
    for content, reason in (('{"a": 1}', "no list"), ("[1]", "no list"), ("[", "no JSON")):
        other.write_text(content)
        with pytest.raises(InvalidInput, match=reason):
            read_symbols(other)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("tiny-1m", 0.78e6, 0.9e6),
        ("tiny-2m", 1.7e6, 1.9e6),
        ("tiny-3m", 2.6e6, 2.8e6),
        ("tiny-5m", 4.6e6, 4.8e6),
    ],
)
def test_shapes_are_as_large_as_they_say(name: str, least: float, most: float) -> None:
    made = make_tiny(name, SYMBOLS)
    rows = made.vocabulary.size * SHAPES[name].hidden
    assert made.num_trained == SHAPES[name].num_layer_parameters + rows
    assert least < made.num_trained < most


def test_weights_are_a_function_of_the_seed() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (make_tiny("tiny-1m", SYMBOLS, seed=s).model for s in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    pairs = list(zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    head = (m.get_output_embeddings().weight for m in (one, other))
    assert not torch.equal(*head)
    with pytest.raises(UnknownName, match="tiny-1m"):
        shape_of("tiny-1n")


def test_a_folder_loads_and_what_its_text_is_stays_text(tmp_path: Path) -> None:
    three = {"num_registers": 3}
    made = new_tiny(tmp_path / "m", "tiny-1m", SYMBOLS, dialect="tip", settings=three)
    lm = LM.load(tmp_path / "m", pool_slots=256)
    assert lm.card == made.card
    assert sorted(lm.card.control) == ["reg_0", "reg_1", "reg_2"]
    assert lm.model.dtype == torch.float32
    assert lm.model.lm_head.weight is lm.model.model.embed_tokens.weight
    (answer,) = lm.generate("1+1=", SamplingParams(max_tokens=5))
    assert answer.usage.prompt_tokens == 5
    with pytest.raises(InvalidInput, match="not an empty folder"):
        new_tiny(tmp_path / "m", "tiny-1m", SYMBOLS)


def test_trained_from_scratch_it_learns_by_heart(tmp_path: Path, capsys: Any) -> None:
    rows = [_row(f"{a}+{b}=", str(a + b)) for a in (0, 1) for b in (0, 1)]
    data, model, out = tmp_path / "rows.jsonl", tmp_path / "m", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["model", "new", "tiny-1m", "--rows", str(data), "--out", str(model)]) == 0
    assert capsys.readouterr().out == f"{model}\n"
    options = "--dialect plain --full --dtype float32 --lr 3e-3 --epochs 50 --batch 4 --quiet"
    command = f"train sft --model {model} --data {data} --out {out} {options} --json"
    assert main(command.split()) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["last"]["loss"] < 0.05
    lm = LM.load(out / "model", pool_slots=256)
    answers = lm.generate([row["prompt"] for row in rows], SamplingParams(max_tokens=5))
    assert [a.text for a in answers] == [row["response"] for row in rows]
    assert {a.finish_reason for a in answers} == {"stop"}


def test_new_tells_what_it_made(tmp_path: Path, capsys: Any) -> None:
    listed = tmp_path / "list.json"
    listed.write_text('["a", "b"]')
    options = ["--vocabulary", str(listed), "--dialect", "tip", "--registers", "2", "--seed", "5"]
    command = ["model", "new", "tiny-1m", "--out", str(tmp_path / "m"), *options, "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "path": str(tmp_path / "m"),
        "shape": "tiny-1m",
        "num_parameters": SHAPES["tiny-1m"].num_layer_parameters + 262 * 128,
        "dialect": "tip",
        "num_symbols": 2,
        "vocab_size": 262,
        "seed": 5,
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "--vocabulary"),
        (["--rows", "r", "--vocabulary", "v"], "--vocabulary"),
        (["--rows", "none"], "none"),
        (["--vocabulary", "v", "--registers", "2"], "no registers"),
        (["--vocabulary", "v", "--dialect", "tap"], "tap"),
        (["--vocabulary", "v", "--seed", "-1"], "seed must be at least 0"),
        (["--vocabulary", "v", "--seed", str(1 << 63)], "seed must be at most"),
    ],
)
def test_new_refuses(
    tmp_path: Path, capsys: Any, monkeypatch: Any, options: Any, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("v").write_text('["a"]')
    assert main(["model", "new", "tiny-1m", "--out", "m", *options]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not Path("m").exists()


@cache
def _plain() -> Any:
    return make_tiny("tiny-1m", SYMBOLS)


def _row(prompt: str, response: str) -> dict[str, str]:
    row = {"prompt": prompt, "response": response, "annotated": response, "annotator": "sum"}
    return {"prompt_id": prompt_id(prompt), **row}
