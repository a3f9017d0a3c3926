"""Perplexity and agreement of rounded weights, against transformers' own loss."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from tiny_lms import tiny_lm

from stretto.bench import weights
from stretto.cli import main
from stretto.engines.hf import HFEngine
from stretto.errors import InvalidInput


def windows(count: int, size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(90) for _ in range(size)] for _ in range(count)]


def test_perplexity_is_that_of_transformers_loss() -> None:
    model = tiny_model("llama")
    engine = HFEngine(model, 64)
    found = windows(3, 20)
    scores = weights.score({weights.REFERENCE: engine}, found, lambda _: None)
    with torch.inference_mode():
        ids = torch.tensor(found)
        loss = float(model(input_ids=ids, labels=ids).loss)
    (row,) = weights.summarise(scores, 20, {weights.REFERENCE: 8}, seed=0)
    assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
    assert [row["ratio"], row["low"], row["high"], row["agreement"], row["kl"]] == [1, 1, 1, 1, 0]


def test_rounded_weights_show() -> None:
    import copy

    exact = tiny_model("llama")
    rough = copy.deepcopy(exact)
    for parameter in rough.parameters():
        parameter.data = (parameter.data * 8).round() / 8
    engines = {weights.REFERENCE: HFEngine(exact, 64), "hf bfloat16": HFEngine(rough, 64)}
    scores = weights.score(engines, windows(8, 30), lambda _: None)
    rows = weights.summarise(scores, 30, dict.fromkeys(engines, 8), seed=0)
    assert rows[1]["kl"] > 0.01
    assert rows[1]["agreement"] < 1
    assert rows[0]["to_bf16"] == pytest.approx(1 / rows[1]["ratio"], rel=1e-3)
    assert len(weights.records_of(scores, 30)) == 16


def test_windows() -> None:
    assert weights.windows_of([[1, 2, 3, 4, 5]], 2, 10) == [[1, 2], [3, 4]]
    assert weights.windows_of([[1, 2, 3], [4], [5, 6]], 2, 10) == [[1, 2], [5, 6]]
    assert weights.windows_of([[1, 2, 3], [4], [5, 6]], 2, 1) == [[1, 2]]
    with pytest.raises(InvalidInput, match="no text has 9 tokens"):
        weights.windows_of([[1]], 9, 1)


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    with pytest.raises(InvalidInput, match="cannot read"):
        weights.read_texts(path, None)
    path.write_text('{"a": "x"}\n\n{"b": 1}\n')
    assert weights.read_texts(path, None) == ['{"a": "x"}\n\n{"b": 1}\n']
    with pytest.raises(InvalidInput, match=r"line 3 .* 'a'; correct it, or name another --field"):
        weights.read_texts(path, "a")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="UTF-8"):
        weights.read_texts(path, None)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_lm("plain", head_dim=16).save(tmp_path / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("some words of no meaning " * 30)
    out = tmp_path / "out"
    command = ["bench", "weights", "--texts", str(texts), "--model", str(folder), "--window", "16"]
    assert main([*command, "--limit", "3", "--json", "--out", str(out)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["side"] == weights.REFERENCE
    assert {row["windows"] for row in rows} == {3}
    run = json.loads((out / "run.json").read_text())
    assert run["settings"]["texts"] == "texts.txt"
    assert len((out / "windows.jsonl").read_text().splitlines()) == 3 * len(rows)
    assert main([*command, "--field", "x"]) == 2


def test_lines_as_json_has_them(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes('\ufeff{"a": "x\u2028y"}\n'.encode())
    assert weights.read_texts(path, "a") == ["x\u2028y"]
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match="line 1"):
        weights.read_texts(path, "a")


@pytest.mark.parametrize("seed", ["-1", str(1 << 63)])
def test_a_seed_out_of_range_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], seed: str
) -> None:
    for verb in (["weights", "--texts", "x"], ["step"]):
        assert main(["bench", *verb, "--seed", seed]) == 2
        assert "--seed" in capsys.readouterr().err
