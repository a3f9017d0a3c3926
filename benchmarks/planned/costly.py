"""What answers would cost a larger model: a tiny one decides, and a large one is run beside it.

A model of a million parameters lies in a processor's cache, where a pass costs what its rows cost.
A pass of a large one costs the reading of its weights too, however few its rows: what it is to
write many tokens at once for. Its weights are random, and its logits are computed and thrown away,
so that texts are those of the tiny model to the letter, and only their seconds are the large one's,
with the tiny one's own on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from stretto import LM
from stretto.bench.source import random_model
from stretto.engines.base import Engine
from stretto.engines.choose import make_engine
from stretto.runtime.views import Run, View

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
}
"""Of SmolLM2-135M (its config.json)."""
SEED = 0


@dataclass(eq=False)
class Costly:
    """An engine with the logits of one engine and the cost of two. What it pays with sees the same
    rows, slots and views, and has as many slots, and rows of its head for every token."""

    decides: Engine
    pays: Engine
    _views: dict[View, View] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own, other = self.decides, self.pays
        if other.num_slots != own.num_slots or other.vocab_size < own.vocab_size:
            raise ValueError(f"{other.name} has other slots, or fewer tokens, than {own.name}")
        self.name = f"{own.name} at the cost of {other.name}"
        self.batch_invariant = own.batch_invariant
        self.vocab_size, self.num_slots = own.vocab_size, own.num_slots
        self.max_positions = min(own.max_positions, other.max_positions)

    def forward(self, runs: list[Run]) -> Float[Tensor, "logit_rows vocab"]:
        # cursors are an engine's own; those of views that are not in this pass are made anew
        views = {run.view: replace(run.view, cursor=None) for run in runs}
        self._views = {view: self._views.get(view, fresh) for view, fresh in views.items()}
        self.pays.forward([replace(run, view=self._views[run.view]) for run in runs])
        return self.decides.forward(runs)

    def copy_out(self, slots: list[int]) -> Any:
        return self.decides.copy_out(slots), self.pays.copy_out(slots)

    def copy_in(self, slots: list[int], kept: Any) -> None:
        own, other = kept
        self.decides.copy_in(slots, own)
        self.pays.copy_in(slots, other)


def payer(num_slots: int, **changes: Any) -> Engine:
    """A model of `SHAPE` but for `changes`, random weights in bfloat16, and a pool of its own."""
    model = random_model(SEED, "bfloat16", **{**SHAPE, **changes})
    return make_engine("auto", model, num_slots, weights="bfloat16", owned=True)


def made_costly(lms: Sequence[LM], **changes: Any) -> list[LM]:
    """The same models at the cost of one large one, which they share: requests to one of them must
    be over before another is asked."""
    pays = payer(lms[0].engine.num_slots, **changes)
    return [
        LM(Costly(lm.engine, pays), lm.vocabulary, lm.card, name=lm.name, tokenizer=lm.tokenizer)
        for lm in lms
    ]
