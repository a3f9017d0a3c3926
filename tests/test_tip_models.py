"""Models with registers: their tokenizers, cards and prompts."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from tiny_lms import tiny_lm, tiny_tokenizer
from tokenizers import AddedToken

from stretto import LM, SamplingParams
from stretto.dialects.registers import register_forms
from stretto.dialects.tags import TAG_FORMS
from stretto.errors import InvalidInput
from stretto.tokens import ModelCard
from stretto.train import make_trainee
from stretto.train.lengths import relabel


def thinking_tokenizer(*, special: bool = False) -> object:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("</think>", special=special, normalized=False)])
    return tokenizer


@pytest.mark.parametrize("special", [False, True])
def test_the_answer_begins_after_the_tokenizers_own_end_of_reasoning(special: bool) -> None:
    tokenizer = thinking_tokenizer(special=special)
    model = copy.deepcopy(tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=None))
    lm = LM.wrap(model, tokenizer, dialect="tip", settings={"num_registers": 2}, pool_slots=256)
    end = tokenizer.convert_tokens_to_ids("</think>")
    assert lm.vocabulary.reasoning_end == end
    drawn = [lm.card.control["reg_1"], 70, end, 71]
    stop = min(lm.vocabulary.end_ids)
    found = lm.submit(
        "Think.", SamplingParams(), script=lambda _, i: drawn[i] if i < len(drawn) else stop
    ).finish()
    assert [(s.role, len(s)) for s in found.trace.response] == [("step", 3), ("answer", 1)]
    assert tiny_lm("tip", pool_slots=64).vocabulary.reasoning_end is None


def test_a_card_keeps_registers_and_grace(tmp_path: Path) -> None:
    settings = {"num_registers": 5, "grace": True}
    tokenizer = tiny_tokenizer()
    model = copy.deepcopy(tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=None))
    lm = LM.wrap(model, tokenizer, dialect="pasta+tip", settings=settings, pool_slots=64)
    folder = lm.save(tmp_path / "model")
    card = ModelCard.load(folder)
    assert (card.dialect, card.num_registers, card.grace) == ("pasta+tip", 5, True)
    assert set(card.control) == {*TAG_FORMS, *register_forms(5)}
    assert LM.load(folder, dtype="float32", pool_slots=64).card == card
    described = json.loads((folder / "stretto.json").read_text())
    described["num_registers"] = 6
    (folder / "stretto.json").write_text(json.dumps(described))
    with pytest.raises(InvalidInput, match="lacks control reg_5"):
        ModelCard.load(folder)
    with pytest.raises(InvalidInput, match="num_registers is 0"):
        LM.wrap(lm.model, tiny_tokenizer(), dialect="tip", settings={"num_registers": 0})


def test_registers_in_a_prompt_are_text() -> None:
    lm = tiny_lm("tip", pool_slots=512)
    ids = lm.encode(lm.chat("Use <reg_0> and <|stretto:reg_0|> now"))
    assert not set(ids) & set(lm.card.control.values())
    assert "<reg_0> and <|stretto:reg_0|> now" in lm.vocabulary.decode(ids)


def test_registers_take_rows_that_a_model_has_to_spare() -> None:
    """As Qwen3 has; one without them grows. Tied embeddings stay tied."""
    for spare in (40, 0):
        tokenizer = tiny_tokenizer()
        rows = len(tokenizer) + spare
        model = copy.deepcopy(
            tiny_model("qwen3", vocab_size=rows, eos_token_id=None, tie_word_embeddings=True)
        )
        trainee = make_trainee(model, tokenizer, dialect="tip", how="full")
        weight = trainee.model.get_input_embeddings().weight
        assert len(weight) == max(rows, len(tokenizer))
        assert trainee.model.get_output_embeddings().weight is weight
        assert max(trainee.card.control.values()) < len(weight)
        forms = [tokenizer.encode(f"<reg_{i}>", add_special_tokens=False) for i in range(16)]
        for i, form in enumerate(forms):
            row = weight[trainee.card.control[f"reg_{i}"]]
            torch.testing.assert_close(row, weight[form].mean(0))


def test_lengths_of_promises_count_a_register_as_one_token() -> None:
    lm = tiny_lm("pasta+tip", pool_slots=64)
    block = "<reg_0>ab<reg_15>c"
    text = f'<promise topic="x" tokens="90"/><async>{block}</async>'
    number = 2 + sum(len(lm.vocabulary.encode(run)) for run in ("ab", "c"))
    assert f'tokens="{number}"' in relabel(text, lm.vocabulary, 1)
