"""Where the weights of a benchmark come from: a model by name, or a random one of a known shape."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stretto.bench.program import Target, Work, check_room
from stretto.models.embedded import EMBEDDED_MODEL

RANDOM_SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
"""A Llama of the shape of Qwen2.5-0.5B (its config.json): 494 million weights."""

RANDOM_NAME = "random-0.5b"

TEXT = (
    "The lighthouse stood at the end of a long pier. Every evening its keeper climbed the stairs, "
    "lit the lamp, and wrote the weather of the day into a book: the wind, the height of the "
    "waves, the ships that had passed. In winter the spray froze on the windows, and he had to "
    "scrape the ice from the glass before anyone at sea could see the light. "
)


@dataclass(frozen=True)
class Source:
    """A model by `name`, or random weights drawn from `seed` if `is_random`."""

    name: str = EMBEDDED_MODEL
    is_random: bool = False
    seed: int = 0

    def target(
        self, *, dtype: str, engine: str, device: str, threads: int | None, room: tuple[int, int],
    ) -> Target:  # fmt: skip
        """The model in an engine with `room`: positions, which it must have, and KV slots."""
        from stretto.lm import DEFAULT_POOL_SLOTS

        positions, slots = room
        check_room(positions, self.context_length, "positions")
        slots = max(DEFAULT_POOL_SLOTS, slots)
        if self.is_random:
            return self._random_target(dtype, engine, device, threads, slots)
        return self._named_target(dtype, engine, device, threads, slots)

    @property
    def context_length(self) -> int:
        if self.is_random:
            return int(RANDOM_SHAPE["max_position_embeddings"])
        from stretto.models import resolve

        return resolve(self.name).facts.context_length

    def hf_model(self, dtype: str) -> Any:
        """The weights as a Hugging Face model on the CPU, of its own, in `dtype`."""
        if self.is_random:
            return random_model(self.seed, dtype)
        from stretto.models import load_hf, resolve

        return load_hf(resolve(self.name).path, dtype=dtype)[0]

    def _named_target(
        self, dtype: str, engine: str, device: str, threads: int | None, slots: int
    ) -> Target:
        import torch
        from transformers import AutoConfig

        from stretto.lm import LM
        from stretto.models import resolve

        lm = LM.load(self.name, dtype=dtype, device=device, engine=engine, pool_slots=slots)
        if threads is not None:
            torch.set_num_threads(threads)
        path = str(resolve(self.name).path)
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return replace(Target.of(lm), work=Work.of(config))

    def _random_target(
        self, dtype: str, engine: str, device: str, threads: int | None, slots: int
    ) -> Target:
        import torch

        from stretto.engines.choose import make_engine

        if threads is not None:
            torch.set_num_threads(threads)
        model = random_model(self.seed, dtype).to(device)
        weights = dtype if dtype == "int8" else str(model.dtype).removeprefix("torch.")
        made = make_engine(engine, model, slots, weights=weights, owned=True)
        return Target.over(made, range(model.config.vocab_size), text_of, RANDOM_NAME, model)


def random_model(seed: int, dtype: str, **changes: Any) -> Any:
    """A Llama of `RANDOM_SHAPE` in eval mode. The weights, drawn in bfloat16, are a function of
    the seed alone; `dtype` float32 only widens them, and int8 leaves packing them to an engine."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from stretto.errors import UnknownName

    kinds = dict.fromkeys(("auto", "bfloat16", "int8"), torch.bfloat16)
    kinds["float32"] = torch.float32
    if dtype not in kinds:
        raise UnknownName("dtype", dtype, list(kinds))
    config = LlamaConfig(**{**RANDOM_SHAPE, "rope_theta": 1e6, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.to(kinds[dtype]).eval()


def text_of(ids: Sequence[int]) -> str:
    """Text of a model without a tokenizer."""
    return "".join(f" {i}" for i in ids)


def prompt_of(target: Target, num_tokens: int, seed: int) -> list[int]:
    """A prompt of so many tokens: plain prose, repeated, where the model has a tokenizer to read
    it with, else random ids."""
    if target.encode is None:
        return target.draw(random.Random(f"prompt/{seed}/{num_tokens}"), num_tokens)
    once = len(target.encode(TEXT))
    return list(target.encode(TEXT * (num_tokens // max(once - 1, 1) + 2)))[:num_tokens]


def starts_of(target: Target, prompt: list[int], num_rows: int, seed: int) -> list[int]:
    """One token per sequence to go on from the prompt with, all different: of the prompt's own as
    far as there are so many, else random ones."""
    rng = random.Random(f"starts/{seed}/{num_rows}")
    own = sorted(set(prompt))
    if len(own) >= num_rows:
        return rng.sample(own, num_rows)
    return rng.sample(list(target.ids), num_rows)
