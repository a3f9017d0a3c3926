"""`transformers.generate` as a side: a greedy batch whose prefix is copied to every row."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from stretto.bench.sides import Decoded, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK = 512
"""Tokens of the prompt in a pass, so that its activations stay small."""


class TransformersSide:
    """A Hugging Face model with its default cache. `generate` begins after the prompt, whose keys
    and values are computed once and repeated for every row."""

    def __init__(self, model: Any) -> None:
        self.name = f"transformers {str(model.dtype).removeprefix('torch.')}"
        self.model = model
        self.cache: Any = None

    @torch.inference_mode()
    def open(self, task: Task) -> None:
        from transformers import DynamicCache

        self._task, self._next, self._num_rows = task, 0, 0
        self.cache = DynamicCache(config=self.model.config)
        for at in range(0, len(task.prompt), CHUNK):
            ids = torch.tensor([task.prompt[at : at + CHUNK]], device=self.model.device)
            self.model.base_model(input_ids=ids, cache=self.cache, use_cache=True)

    @torch.inference_mode()
    def run(self) -> Decoded:
        from transformers import GenerationConfig, LogitsProcessorList

        task, clock = self._task, _Clock()
        starts = task.bursts[self._next]
        self._next += 1
        if len(starts) != self._num_rows:
            self.cache.batch_select_indices(torch.zeros(1, dtype=torch.long))
            self.cache.batch_repeat_interleave(len(starts))
            self._num_rows = len(starts)
        ids = torch.tensor([[*task.prompt, s] for s in starts], device=self.model.device)
        num_new, no_id = task.num_steps + 1, self.model.config.vocab_size
        # No token is the end of a sequence, so that all rows are decoded to the same length.
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=num_new, eos_token_id=no_id, pad_token_id=0
        )
        written = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=self.cache,
            generation_config=settings,
            logits_processor=LogitsProcessorList([clock]),
        )
        self.cache.crop(-num_new)
        if len(clock.times) != num_new or clock.first is None:
            raise AssertionError(f"generate drew {len(clock.times)} tokens, not {num_new}")
        tokens = written[:, ids.shape[1] :].tolist()
        return Decoded(clock.times[-1] - clock.times[0], tokens, clock.first)

    def close(self) -> None:
        self.cache = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(
            t.numel() * t.element_size() for layer in self.cache.layers
            for t in (layer.keys, layer.values)
        )  # fmt: skip


class _Clock:
    """A logits processor that changes nothing and notes when the logits of each step are there."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.first: NDArray[np.float32] | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = scores.float().cpu().numpy().copy()
        self.times.append(time.perf_counter())
        return scores
