"""Requests under a policy on the stub engine, and what their rows see: shared by the tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from orchestras import scripted
from stubs import StubEngine
from torch import Tensor

from stretto.dialects.plain import PlainSession
from stretto.methods.evicting import EvictingMethod
from stretto.methods.paged_h2o import PagedH2O
from stretto.methods.random_evict import RandomEvict
from stretto.methods.streaming_llm import StreamingLLM
from stretto.methods.window import SlidingWindow
from stretto.params import SamplingParams
from stretto.runtime.request import Request
from stretto.runtime.views import Run
from stretto.trace import Trace, visible

Weight = Callable[[int, int], float]
"""How much the row at one position attends to the token at another, before normalisation."""

BUDGET = 24
PAGE = 4
LIKED = [0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66, 78, 91, 105]
METHODS: dict[str, EvictingMethod] = {
    "window": SlidingWindow(budget=BUDGET),
    "window-pages": SlidingWindow(budget=BUDGET, page_tokens=PAGE),
    "streaming": StreamingLLM(budget=BUDGET),
    "streaming-pages": StreamingLLM(budget=BUDGET, page_tokens=PAGE),
    "random": RandomEvict(budget=BUDGET),
    "random-pages": RandomEvict(budget=BUDGET, page_tokens=PAGE),
    "h2o": PagedH2O(budget=BUDGET, page_tokens=PAGE),
    "window-share": SlidingWindow(budget=0.5, page_tokens=2),
    "h2o-share": PagedH2O(budget=0.5, page_tokens=2),
}


def pinned(method: EvictingMethod) -> EvictingMethod:
    from dataclasses import replace

    return replace(method, pin_prompt=True)


ALL = METHODS | {f"{name}-pinned": pinned(method) for name, method in METHODS.items()}


class MassStub(StubEngine):
    """A stub that also gives attention mass: what `weight` says, each row's made 1 in all."""

    def __init__(self, weight: Weight, **options: Any) -> None:
        super().__init__(**{"vocab_size": 96, **options})
        self.weight = weight

    def refusal(self, extra: str) -> str | None:
        return None if extra == "attention mass" else "a stub turns no keys"

    def forward(self, runs: list[Run]) -> Tensor:
        for run in runs:
            if run.view.attention is not None:
                run.view.attention.add(run, self._mass(run))
        return super().forward(runs)

    def _mass(self, run: Run) -> np.ndarray:
        mass = np.zeros((len(run.tokens), self.num_slots))
        thread, memory = run.view.thread, run.view.memory
        # Of one causal thread: what it sees lies before its own segment.
        handles = [h for h in thread.sees if h < run.segment.handle]
        keys = [
            (memory.slots[h].slots[i], position)
            for h in handles
            for i, position in enumerate(_segments(run)[h].positions)
        ]
        own = zip(memory.slots[run.segment.handle].slots, run.segment.positions, strict=False)
        keys += list(own)
        for row, query in enumerate(run.positions):
            seen = [(slot, self.weight(query, key)) for slot, key in keys if key <= query]
            total = sum(weight for _, weight in seen)
            for slot, weight in seen:
                mass[row, slot] = weight / total
        return mass


_RECORDERS: dict[int, Any] = {}


def _segments(run: Run) -> Any:
    return _RECORDERS[id(run.view.memory)].segments


def bumpy(query: int, key: int) -> float:
    """Attention that moves on: rows attend to the newest of pages 0, 1, 3, 6, 10, 15, …, each for
    longer than to the one before, so that early tokens do not stay the heavy ones for ever."""
    return 1000.0 ** LIKED.index(key // PAGE) if key // PAGE in LIKED else 0.1


def ask(
    method: EvictingMethod | None, num_prompt: int, num_tokens: int, *, seed: int = 0,
    sample: int = 0, pool_page: int = 1, max_positions: int = 512, **changes: Any,
) -> Request:  # fmt: skip
    """A request of scripted tokens (which are random) under a method's policy."""
    rng = random.Random(f"prompt {seed}")
    params = SamplingParams(max_tokens=num_tokens, seed=seed)
    policy = None
    if method is not None:
        policy = method.policy(num_prompt, params, pool_page=pool_page, sample=sample)
    request = Request(
        [rng.randrange(60) for _ in range(num_prompt)],
        PlainSession(),
        params,
        **{
            "decode": lambda ids: " ".join(map(str, ids)),
            "end_ids": frozenset(),
            "max_positions": max_positions,
            "script": scripted(seed),
            "sample": sample,
            "policy": policy,
            **changes,
        },
    )
    _RECORDERS[id(request.memory)] = request.recorder
    return request


def seen_sets(trace: Trace) -> list[set[int]]:
    """Of each response token, the indices of all tokens it sees, itself included: by `visible`."""
    flat = [(s, i) for s in trace.segments for i in range(len(s))]
    num_prompt = sum(len(s) for s in trace.prompt)
    return [
        {k for k, (key, j) in enumerate(flat[: q + 1]) if visible(query, i, key, j)}
        for q, (query, i) in enumerate(flat)
        if q >= num_prompt
    ]
