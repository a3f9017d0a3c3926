"""A tiny random pasta model that is fond of promises, so that its samples really fork."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from conftest import tiny_model
from tiny_lms import tiny_tokenizer

from stretto import LM
from stretto.data.rows import Answer
from stretto.data.sample import sample_answers, tasks_of
from stretto.params import SamplingParams

FONDNESS = {"promise": 3.5, "tokens": 4.0, "promise_end": 4.0, "async_end": 4.5, "sync": 3.0}
"""What is added to the logits of control tokens, on average."""

END = 3.5


def forking_lm(*, max_positions: int = 1 << 16, head_dim: int = 8) -> LM:
    """Engine `hf` in float32. The many positions are for promises of up to 2048 tokens."""
    tokenizer = tiny_tokenizer()
    changes = {"vocab_size": len(tokenizer), "eos_token_id": None, "head_dim": head_dim}
    model = copy.deepcopy(tiny_model("llama", max_position_embeddings=max_positions, **changes))
    lm = LM.wrap(model, tokenizer, dialect="pasta", name="forking", pool_slots=8192)
    ids = torch.randint(3, 90, (8, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mean = model.model(ids).last_hidden_state.flatten(0, 1).mean(0)
        direction = mean / mean.dot(mean)
        for name, amount in FONDNESS.items():
            model.lm_head.weight[lm.vocabulary.control[name]] += amount * direction
        for end in lm.vocabulary.end_ids:
            model.lm_head.weight[end] += END * direction
    return lm


def forking_answers(lm: LM, prompts: Sequence[str], n: int, *, seed: int = 3) -> list[Answer]:
    """Samples at temperature 1, in the order of their keys."""
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=seed)
    rows = [r for r in sample_answers(lm, tasks_of(prompts, n), params) if isinstance(r, Answer)]
    return sorted(rows, key=lambda row: row.key)
