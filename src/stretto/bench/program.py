"""What is decoded while measuring: forced tokens, by a program that forks threads in bursts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from stretto.dialects.plain import PlainSession
from stretto.effects import Close, Fork, Move, Place, Wait
from stretto.errors import InvalidInput
from stretto.recorder import MAIN, OpenThread, Recorder

if TYPE_CHECKING:
    from stretto.engines.base import Engine
    from stretto.lm import LM
    from stretto.runtime.request import Request
    from stretto.runtime.text import Decode


@dataclass(frozen=True, slots=True)
class Work:
    """Multiplications of a pass, from the shapes of a model.

    `linear_weights`: entries of the matrices that a row is multiplied by, the output head's
    included. `attention_width`: layers x query heads x head_dim.
    """

    linear_weights: int
    attention_width: int

    @classmethod
    def of(cls, config: Any) -> Self:
        hidden, layers = config.hidden_size, config.num_hidden_layers
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        layer = 2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * config.intermediate_size
        return cls(layers * layer + config.vocab_size * hidden, layers * heads * head_dim)

    def flops(self, rows: int, context: int) -> int:
        """FLOPs of a pass of `rows` rows, each with logits and each seeing `context` tokens: two
        per weight of a linear layer and row, four per entry of attention's width and seen token.
        Norms, rotations and activations are not counted."""
        return rows * (2 * self.linear_weights + 4 * self.attention_width * context)


@dataclass(frozen=True, eq=False)
class Target:
    """What is measured: an engine, and ids that may stand in a text.

    `weight_bytes`: what one pass must read of the weights, each once; None if not known, as `work`
    and, without a tokenizer, `encode`.
    """

    engine: Engine
    ids: Sequence[int]
    decode: Decode
    name: str
    dtype: str = "none"
    device: str = "cpu"
    weight_bytes: int | None = None
    work: Work | None = None
    encode: Callable[[str], Sequence[int]] | None = None

    @classmethod
    def of(cls, lm: LM) -> Self:
        vocabulary = lm.vocabulary
        barred = {*vocabulary.control.values(), *vocabulary.spare_ids, *vocabulary.end_ids}
        ids = [i for i in range(vocabulary.size) if i not in barred]
        target = cls.over(lm.engine, ids, vocabulary.decode, lm.name)
        return replace(target, encode=vocabulary.encode)

    @classmethod
    def over(
        cls, engine: Any, ids: Sequence[int], decode: Decode, name: str, model: Any = None
    ) -> Self:
        """Of an engine and the Hugging Face model it was made of. What the engine itself says of
        its `weights`, `device` and `weight_bytes` counts, else what the model says."""
        model = getattr(engine, "model", None) if model is None else model
        read = getattr(engine, "weight_bytes", None)
        if read is None and model is not None:
            read = weight_bytes(model)
        dtype = getattr(engine, "weights", None) or getattr(model, "dtype", "none")
        device = getattr(engine, "device", None) or getattr(model, "device", "cpu")
        return cls(
            engine=engine,
            ids=ids,
            decode=decode,
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            weight_bytes=read,
            work=None if model is None else Work.of(model.config),
        )

    def draw(self, rng: random.Random, count: int) -> list[int]:
        return rng.choices(self.ids, k=count)

    def check_room(self, positions: int, slots: int) -> None:
        """Raises `InvalidInput` unless so many positions and KV slots are there."""
        check_room(positions, self.engine.max_positions, "positions")
        check_room(slots, self.engine.num_slots, "KV slots")


def check_room(need: int, room: int, what: str) -> None:
    if need > room:
        raise InvalidInput(
            f"this needs {need} {what} but there are {room}; "
            "ask for fewer tokens, threads or context"
        )


def weight_bytes(model: Any) -> int:
    """Bytes of all weights but the input embedding, of which a pass reads only a few rows (it
    counts whole where it is the output head too)."""
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    unread = 0 if head.data_ptr() == table.data_ptr() else table.numel() * table.element_size()
    return int(sum(p.numel() * p.element_size() for p in model.parameters()) - unread)


class ForkProgram(PlainSession):
    """Main draws one token, then forks bursts of threads, each after the one before has ended.

    `bursts`: per burst, the one token injected into each of its threads. A thread ends with its
    token number `num_tokens`, which is left out unless it `keeps_last` (what is kept costs a row in
    the first pass of the next burst). No thread is joined: its slots are free at its end.
    """

    def __init__(
        self, bursts: Sequence[Sequence[int]], num_tokens: int, *, keeps_last: bool = True
    ) -> None:
        super().__init__()
        self.bursts = bursts
        self.num_tokens = num_tokens
        self.keeps_last = keeps_last

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        if thread.name != MAIN:
            if thread.num_drawn < self.num_tokens:
                return [Place(token)]
            return [Place(token), Close("stop")] if self.keeps_last else [Close("stop")]
        moves: list[Move] = [Place(token)]
        number = 0
        for burst in self.bursts:
            names = [child_name(number + i) for i in range(len(burst))]
            number += len(burst)
            moves += [
                Fork(name, inject=(start,), joins=False)
                for name, start in zip(names, burst, strict=True)
            ]
            moves.append(Wait(tuple(names)))
        return [*moves, Close("stop")]


def child_name(index: int) -> str:
    """Threads are numbered from 1 over all bursts."""
    return f"{MAIN}.{index + 1}"


def drawn_tokens(request: Request, thread: str) -> list[int]:
    """What a thread drew, in order."""
    segments = [request.recorder.segments[h] for h in request.recorder.threads[thread].segments]
    return [
        token
        for segment in segments
        for token, step in zip(segment.tokens, segment.steps, strict=True)
        if step is not None
    ]


def last_step(request: Request) -> int:
    """The step of the last token that any thread drew: the measured critical path."""
    steps = [s for segment in request.recorder.segments for s in segment.steps if s is not None]
    return max(steps, default=0)
