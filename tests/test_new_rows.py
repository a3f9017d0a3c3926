"""What the rows of new control tokens begin as."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import tiny_model
from tiny_lms import tiny_tokenizer

from stretto.errors import InvalidInput
from stretto.train import make_trainee


def plain_model(*, tied: bool) -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer()
    settings = {"vocab_size": len(tokenizer), "tie_word_embeddings": tied, "eos_token_id": None}
    return copy.deepcopy(tiny_model("llama", **settings)), tokenizer


def test_new_rows_begin_as_the_mean_of_their_text_forms() -> None:
    model, tokenizer = plain_model(tied=False)
    trainee = make_trainee(model, tokenizer, how="full")
    table = trainee.model.get_input_embeddings().weight
    ids = tokenizer.backend_tokenizer.encode("<sync/>", add_special_tokens=False).ids
    assert torch.allclose(table[trainee.card.control["sync"]], table[ids].mean(0), atol=1e-6)
    with pytest.raises(InvalidInput, match="init is 'zero'"):
        make_trainee(model, tokenizer, init="zero")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("init", ["forms", "mean", "random"])
def test_rows_that_a_model_has_to_spare_are_initialised_too(init: str, tied: bool) -> None:
    """Qwen's tables have more rows than its tokenizer has tokens; nothing ever trained them."""
    model, tokenizer = plain_model(tied=tied)
    size = len(tokenizer)
    model.resize_token_embeddings(size + 4, mean_resizing=False)
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    with torch.no_grad():
        for table in tables:
            table[size:] = 9.0
    trainee = make_trainee(model, tokenizer, how="full", init=init)
    rows = list(trainee.card.control.values())
    assert rows == list(range(size, size + 6))  # four to spare, and two more
    ids = tokenizer.backend_tokenizer.encode("<sync/>", add_special_tokens=False).ids
    for layer in (trainee.model.get_input_embeddings(), trainee.model.get_output_embeddings()):
        table = layer.weight.detach()
        assert float(table[rows].abs().max()) < 5
        if init == "forms":
            assert torch.allclose(
                table[trainee.card.control["sync"]], table[ids].mean(0), atol=1e-6
            )
            continue
        assert len({tuple(row) for row in table[rows].tolist()}) == 6
        mean = table[:size].mean(0)
        if init == "mean":
            assert float((table[size : size + 4] - mean).abs().max()) < 0.1
        else:
            spread = float((table[rows] - mean).std() / table[:size].std())
            assert 0.7 < spread < 1.4
