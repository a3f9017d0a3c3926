"""What a request brings to a pass: its unfed tokens, in the order in which they were placed."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor

from stretto.recorder import Recorder
from stretto.runtime.lane import Lane
from stretto.runtime.memory import RequestMemory
from stretto.runtime.pool import Pool
from stretto.runtime.views import Run, runs_of

LaneRows = tuple[Lane, dict[int, int]]
"""Of one lane, how many tokens of which segments a pass feeds."""


class Feed:
    """The rows of one request. `lanes` are the request's own, by thread name."""

    def __init__(self, recorder: Recorder, memory: RequestMemory, lanes: dict[str, Lane]) -> None:
        self._recorder = recorder
        self._memory = memory
        self._lanes = lanes
        self._next: tuple[int, list[LaneRows]] | None = None

    def pages_needed(self, pool: Pool, limit: int) -> int:
        """Free pages that the next pass of at most `limit` rows takes."""
        return self._memory.pages_needed(pool, (rows for _, rows in self._next_rows(limit)))

    def allocate(self, pool: Pool, limit: int) -> list[Run]:
        """Takes the slots of the next pass and returns its runs."""
        chosen = self._next_rows(limit)
        self._memory.extend(pool, (rows for _, rows in chosen))
        runs: list[Run] = []
        for lane, rows in chosen:
            wants = lane.thread.is_open and not lane.moves
            runs += runs_of(lane.view, self._recorder.segments, sum(rows.values()), wants)
        return runs

    def fed(self, runs: list[Run], logits: Float[Tensor, "logit_rows vocab"]) -> None:
        """A pass has fed the runs: lanes keep the logits of their newest rows. The lane of a
        closed thread that has nothing unfed any more is dropped."""
        self._next = None
        rows = iter(np.ascontiguousarray(logits.detach().numpy()))
        for run in runs:
            thread = run.view.thread
            self._recorder.fed(thread, len(run.tokens))
            if run.num_logits:
                self._lanes[thread.name].logits = next(rows)
            if not thread.is_open and not thread.unfed:
                del self._lanes[thread.name]

    def _next_rows(self, limit: int) -> list[LaneRows]:
        """The next `limit` unfed tokens; found once a pass, since nothing is placed before it."""
        if self._next is None or self._next[0] != limit:
            self._next = limit, self._find_rows(limit)
        return self._next[1]

    def _find_rows(self, limit: int) -> list[LaneRows]:
        lanes = [lane for lane in self._lanes.values() if lane.thread.unfed]
        last = None
        if self._recorder.num_unfed > limit:
            last = sorted(u.order for lane in lanes for u in lane.thread.unfed)[limit - 1]
        chosen = []
        for lane in lanes:
            counts: dict[int, int] = {}
            for unfed in lane.thread.unfed:
                if last is not None and unfed.order > last:
                    break
                counts[unfed.segment] = counts.get(unfed.segment, 0) + 1
            if counts:
                chosen.append((lane, counts))
        return chosen
