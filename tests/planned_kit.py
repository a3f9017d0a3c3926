"""Tiny models of dialect planned, texts of several rounds, two streams, and losses by hand."""

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
from stretto.train.noise import Noise, Streams, draw_noise, generator_of, with_copies
from stretto.train.planned import Planned
from stretto.train.renewed import Renewed

WORDS = ["Paris", "is", "the", "capital", "of", "France", "and", "more"]
PROMPT = "What is it?"
VARIANTS = ("sparse", "dense")
CONVENTIONS = ("shifted", "aligned")


def planned_lm(
    variant: str = "sparse", convention: str = "shifted", *, unit: int = 10, **card: Any
) -> LM:
    """`card`: other fields of its card."""
    lm = tiny_lm("planned")
    own = {"variant": variant, "convention": convention, "unit": unit, **card}
    return LM.wrap(
        lm.model, lm.tokenizer, card=lm.card.model_copy(update=own), pool_slots=2048, name="tiny"
    )


def maker_of(lm: LM) -> ExampleMaker:
    return ExampleMaker(lm.vocabulary, lm.card, lm.engine.max_positions)


def prompt_ids(lm: LM) -> list[int]:
    return lm.encode(lm.chat(PROMPT))


def span(topic: str, text: str, tokens: int) -> str:
    return f'<promise topic="{topic}" tokens="{tokens}"/><async>{text}</async>'


TWO_ROUNDS = (
    f"{span('one', 'Paris is', 10)}{span('two', 'the capital', 20)}<sync/>{span('sum', 'more', 10)}"
)


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


def hide(example: Example, masked: torch.Tensor, level: float = 0.5) -> Noise:
    return Noise(masked, torch.full((len(example),), level))


@torch.no_grad()
def logits_of(model: Any, example: Example) -> torch.Tensor:
    """The logits of every token of an example, in one masked pass."""
    states = hidden_states(model, Batch.of([example]), plain=True)
    return Head.of(model).logits(states).float()


def objective(lm: LM, examples: list[Example], **changes: Any) -> Planned:
    own = {"mask": lm.card.control["mask"], "shifted": lm.card.convention == "shifted"}
    return Planned(Renewed(examples), **{**own, **changes})


def some_noise(example: Example, seed: int) -> Noise:
    return draw_noise(example, generator_of(seed, 0))


# -- written down by hand --------------------------------------------------------------------------


def loss_by_hand(
    lm: LM, before: list[int], spans: list[tuple[list[int], list[bool], float]]
) -> float:
    """The loss of the masked tokens of one round's spans, each given by its tokens, which of them
    are masked, and its level; `before` is what they follow."""
    mask, total = lm.card.control["mask"], 0.0
    shown = [
        [mask if m else t for t, m in zip(tokens, masked, strict=True)]
        for tokens, masked, _ in spans
    ]
    first = 0 if lm.card.convention == "shifted" else 1
    for rows, (tokens, masked, level) in zip(span_rows(lm, before, shown), spans, strict=True):
        found = [float(rows[first + j, t]) for j, t in enumerate(tokens) if masked[j]]
        total -= sum(found) / level
    return total


@torch.no_grad()
def span_rows(lm: LM, before: list[int], spans: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities over what may stand in a span, a row a token, of each span's tag, tokens
    and last tag. A mask over one flat sequence, and the model: nothing else."""
    control = lm.card.control
    parts = [[control["async"], *tokens, control["async_end"]] for tokens in spans]
    ids = [*before, *(token for part in parts for token in part)]
    owner = torch.tensor([0] * len(before) + [k for k, p in enumerate(parts, 1) for _ in p])
    in_span, same = owner > 0, owner[:, None] == owner[None, :]
    visible = torch.ones(len(ids), len(ids)).tril().bool() & ~in_span[None, :]
    siblings = same | torch.tensor(lm.card.variant == "dense")
    visible |= siblings & in_span[:, None] & in_span[None, :]
    logits = lm.model(
        input_ids=torch.tensor([ids]), attention_mask=visible[None, None]
    ).logits[0].float()  # fmt: skip
    legal = torch.tensor([bool(lm.vocabulary.decode([i])) for i in range(logits.shape[1])])
    legal[[*control.values(), *lm.vocabulary.spare_ids, *lm.vocabulary.end_ids]] = False
    legal[control["pad"]] = True
    logits[:, ~legal] = -torch.inf
    rows = logits.log_softmax(-1)[len(before) :]
    return list(rows.split([len(part) for part in parts]))


# -- rows ------------------------------------------------------------------------------------------


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
