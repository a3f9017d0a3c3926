"""A tiny random tip model that is fond of a few registers, so that its rollouts really forget, and
problems that it solves now and then."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from conftest import tiny_model
from tiny_lms import tiny_tokenizer

from stretto import LM
from stretto.train.trainee import Trainee

FONDNESS = {"reg_0": 3.5, "reg_1": 3.5, "reg_2": 3.5}
DIGIT, END = 4.0, 3.5
"""What is added, on average, to the logits of registers, of the digit 7, and of ends."""


def forgetful_lm(*, dialect: str = "tip", head_dim: int = 8, kind: str = "llama") -> LM:
    """Engine `hf` in float32, often writing the registers of `FONDNESS`, and 7."""
    tokenizer = tiny_tokenizer()
    changes = {"vocab_size": len(tokenizer), "eos_token_id": None, "head_dim": head_dim}
    model = copy.deepcopy(tiny_model(kind, max_position_embeddings=2048, **changes))
    lm = LM.wrap(model, tokenizer, dialect=dialect, name="forgetful", pool_slots=4096)
    ids = torch.randint(3, 90, (8, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mean = model.model(ids).last_hidden_state.flatten(0, 1).mean(0)
        direction = mean / mean.dot(mean)
        for name, amount in FONDNESS.items():
            if name in lm.vocabulary.control:
                model.lm_head.weight[lm.vocabulary.control[name]] += amount * direction
        model.lm_head.weight[lm.vocabulary.encode("7")] += DIGIT * direction
        for end in lm.vocabulary.end_ids:
            model.lm_head.weight[end] += END * direction
    return lm


def trainee_of(lm: LM, how: str = "full") -> Trainee:
    from stretto.train.trainee import make_trainee

    return make_trainee(
        lm.model, lm.tokenizer, dialect=lm.card.dialect, card=lm.card, how=how,  # type: ignore[arg-type]
    )  # fmt: skip


def write_problems(path: Path, count: int = 8, first: int = 0) -> Path:
    """Prompts whose answer is 7: the last number of some texts of the model, and not of others."""
    rows = [{"prompt": f"say {k}", "answer": "7"} for k in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
