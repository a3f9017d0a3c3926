"""Tiny models of dialect planned, texts of several rounds, and passes over two streams."""

from __future__ import annotations

import random
from typing import Any

import torch
from tiny_lms import tiny_lm

from stretto import LM
from stretto.data.rows import Annotated, prompt_id
from stretto.train.batches import Batch
from stretto.train.examples import Example, ExampleMaker
from stretto.train.head import Head
from stretto.train.logprobs import hidden_states
from stretto.train.noise import Noise, Streams, with_copies

WORDS = ["Paris", "is", "the", "capital", "of", "France", "and", "more"]
PROMPT = "What is it?"


def planned_lm(variant: str = "sparse", convention: str = "shifted", *, unit: int = 10) -> LM:
    lm = tiny_lm("planned")
    own = {"variant": variant, "convention": convention, "unit": unit}
    return LM.wrap(
        lm.model, lm.tokenizer, card=lm.card.model_copy(update=own), pool_slots=2048, name="tiny"
    )


def maker_of(lm: LM) -> ExampleMaker:
    return ExampleMaker(lm.vocabulary, lm.card, lm.engine.max_positions)


def prompt_ids(lm: LM) -> list[int]:
    return lm.encode(lm.chat(PROMPT))


def span(topic: str, text: str, tokens: int) -> str:
    return f'<promise topic="{topic}" tokens="{tokens}"/><async>{text}</async>'


def planned_text(lm: LM, seed: int, rounds: int = 3) -> str:
    """A text of so many rounds of one to three spans each, promised as long as they are."""
    rng, parts = random.Random(seed), []
    for _ in range(rounds):
        spans = []
        for _ in range(rng.randrange(1, 4)):
            text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 4)))
            size = len(lm.vocabulary.encode(text))
            tokens = -(-size // lm.card.unit) * lm.card.unit
            spans.append(span(rng.choice(WORDS), text, tokens))
        parts.append("".join(spans))
    return "<sync/>".join(parts)


def example_of(lm: LM, text: str) -> Example:
    return maker_of(lm).from_annotated(prompt_ids(lm), text)


def streams_of(lm: LM, example: Example, noise: Noise) -> Streams:
    mask, shifted = lm.card.control["mask"], lm.card.convention == "shifted"
    return with_copies(example, noise, mask=mask, shifted=shifted)


def hide(example: Example, hidden: torch.Tensor, level: float = 0.5) -> Noise:
    return Noise(hidden, torch.full((len(example),), level))


@torch.no_grad()
def logits_of(model: Any, example: Example) -> torch.Tensor:
    """The logits of every token of an example, in one masked pass."""
    states = hidden_states(model, batch_of_all(example), plain=True)
    return Head.of(model).logits(states).float()


def batch_of_all(example: Example) -> Batch:
    return Batch.of([example])


def planned_rows(count: int = 8) -> list[dict[str, Any]]:
    """Rows of two rounds, with three spans."""
    rows = []
    for k in range(count):
        prompt = f"question {k}"
        body = f"part {'of it ' * (k % 3)}"
        text = f"{span('one', body, 30)}{span('two', 'second', 10)}<sync/>{span('sum', 'done', 10)}"
        row = Annotated(
            prompt_id=prompt_id(prompt), prompt=prompt, response=f"{body}seconddone",
            annotated=text, annotator="test",
        )  # fmt: skip
        rows.append(row.model_dump(exclude_none=True))
    return rows
