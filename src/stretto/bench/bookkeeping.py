"""What the runtime's books cost, counted and not timed, over an engine that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from stretto.bench.pairs import rounded
from stretto.bench.program import ForkProgram
from stretto.params import SamplingParams
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.runtime.views import Run

CONTEXTS = (200, 8000)
NUM_TOKENS = 32
VOCAB_SIZE = 8

DEFINITIONS = {
    "entries_per_token": "entries of views and segments that the recorder touches while r threads "
    "decode, per drawn token",
    "entries_per_fork": "the same for one fork, its injected token included",
    "fork_slots": "KV slots that the forks themselves take",
    "fork_rows": "rows that a fork brings to a pass: its injected token, and no prefill",
}


class NullEngine:
    """An engine that computes nothing and counts the rows of each pass."""

    name = "null"
    batch_invariant = True
    vocab_size = VOCAB_SIZE

    def __init__(self, num_slots: int) -> None:
        self.num_slots = self.max_positions = num_slots
        self.rows: list[int] = []

    def forward(self, runs: list[Run]) -> Tensor:
        self.rows.append(sum(len(r.tokens) for r in runs))
        return torch.zeros(sum(r.num_logits for r in runs), VOCAB_SIZE)

    def copy_out(self, slots: list[int]) -> None:
        return None

    def copy_in(self, slots: list[int], kept: Any) -> None:
        return None


def count_bookkeeping(
    rows: Sequence[int], contexts: Sequence[int] = CONTEXTS
) -> list[dict[str, Any]]:
    """A row of counts per context and number of threads. Exact: the same at every call."""
    return [_count(context, num_rows) for context in contexts for num_rows in rows]


def _count(context: int, num_rows: int) -> dict[str, Any]:
    engine = NullEngine(context + 1 + num_rows * (NUM_TOKENS + 1))
    pool = Pool(engine.num_slots)
    scheduler = Scheduler(engine, pool)
    request = Request(
        [1] * context,
        ForkProgram([[2] * num_rows], NUM_TOKENS),
        SamplingParams(max_tokens=1 + num_rows * NUM_TOKENS),
        decode=lambda ids: "x" * len(ids),
        end_ids=frozenset(),
        max_positions=engine.max_positions,
    )
    recorder = request.recorder
    at_start = recorder.entries_touched
    scheduler.submit(request)
    while request.step < 1:
        scheduler.step()
        request.check()
    forked, slots = recorder.entries_touched, pool.num_slots - pool.num_free_pages
    num_prefill = len(engine.rows)
    while scheduler.step():
        pass
    request.check()
    num_drawn = num_rows * NUM_TOKENS
    return rounded(
        {
            "context": context,
            "rows": num_rows,
            "entries_per_token": (recorder.entries_touched - forked) / num_drawn,
            "entries_per_fork": (forked - at_start - 1) / num_rows,
            "fork_slots": slots - context,
            "fork_rows": (engine.rows[num_prefill] - 1) / num_rows,
        }
    )
