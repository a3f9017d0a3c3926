"""The policy in training, answering prompts in the runtime with the weights it has now."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from stretto.engines.choose import AUTO, check_engine, make_engine
from stretto.errors import InvalidInput, Unsupported
from stretto.lm import LM

if TYPE_CHECKING:
    from stretto.engines.base import Engine
    from stretto.train.trainee import Trainee

AS_IT_IS = ("hf", "flex")
"""Engines that run the very weights in training; others run a packed copy of them."""

NAME = "policy"

MOST_SLOTS = 1 << 16
"""Of a pool whose size nobody gave: requests that do not fit wait for others to end."""


class PolicyRuntime:
    """Makes an `LM` of a trainee's weights as they are. Nothing is read from disk or written.

    `engine` auto is `fused` where it can run the model, else `hf`. With `fused` the weights are
    packed anew each time, an adapter being merged into a copy first; `hf` and `flex` run the
    trainee's own weights. `pool_slots` KV slots are there while it answers. Raises `Unsupported`
    for an engine that cannot run the model, and `UnknownName`.
    """

    def __init__(self, trainee: Trainee, *, engine: str = AUTO, pool_slots: int) -> None:
        check_engine(engine)
        if engine == "packed":
            raise Unsupported("engine 'packed' uses up the weights in training; take fused or hf")
        self._trainee = trainee
        self._pool_slots = pool_slots
        self._lasting: LM | None = None
        self.engine = self._choose() if engine == AUTO else engine

    @contextmanager
    def answering(self) -> Iterator[LM]:
        """An `LM` of the weights as they are, in eval mode; not to be used afterwards."""
        model = self._trainee.model
        was_training = model.training
        model.eval()
        try:
            yield self._lm()
        finally:
            model.train(was_training)

    def _lm(self) -> LM:
        if self._lasting is not None:
            return self._lasting
        if self.engine not in AS_IT_IS:
            return self._wrapped(self._packed())
        made = make_engine(
            self.engine, self._trainee.plain_model, self._pool_slots, weights=self._dtype
        )
        self._lasting = self._wrapped(made)
        return self._lasting

    def _wrapped(self, engine: Engine) -> LM:
        trainee = self._trainee
        return LM(
            engine, trainee.vocabulary, trainee.card, name=NAME, tokenizer=trainee.tokenizer,
            page_size=128 if self.engine == "flex" else 1,
        )  # fmt: skip

    def _packed(self) -> Engine:
        trainee = self._trainee
        model, own = trainee.plain_model, False
        if trainee.how == "lora":
            model, own = copy.deepcopy(trainee.model).merge_and_unload(), True
        return make_engine("fused", model, self._pool_slots, weights=self._dtype, owned=own)

    @property
    def _dtype(self) -> str:
        return str(self._trainee.plain_model.dtype).removeprefix("torch.")

    def _choose(self) -> str:
        with suppress(InvalidInput):
            if self._trainee.plain_model.device.type == "cpu":
                self.engine = "fused"
                self._packed()
                return "fused"
        return "hf"


def pool_slots_for(num_requests: int, tokens: int) -> int:
    """KV slots for so many requests of so many tokens each, up to `MOST_SLOTS`."""
    return max(2, min(num_requests * tokens, MOST_SLOTS))
