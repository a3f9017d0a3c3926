"""What a request brings to a pass: its unfed tokens, in the order in which they were placed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from stretto.recorder import MAIN, Recorder
from stretto.runtime.lane import Lane
from stretto.runtime.memory import RequestMemory
from stretto.runtime.pool import Pool
from stretto.runtime.views import Run, runs_of


@dataclass(frozen=True, slots=True)
class LaneRows:
    """What a pass feeds of one lane: its first `count` unfed tokens, for which its segments are
    to have slots for so many tokens."""

    lane: Lane
    count: int
    lengths: dict[int, int]


class Feed:
    """The rows of one request. `lanes` are the request's own, by thread name."""

    def __init__(self, recorder: Recorder, memory: RequestMemory, lanes: dict[str, Lane]) -> None:
        self._recorder = recorder
        self._memory = memory
        self._lanes = lanes
        self._next: tuple[int, list[LaneRows]] | None = None

    def pages_needed(self, pool: Pool, limit: int) -> int:
        """Free pages that the next pass of about `limit` rows takes."""
        return self._memory.pages_needed(pool, (rows.lengths for rows in self._next_rows(limit)))

    def allocate(self, pool: Pool, limit: int) -> list[Run]:
        """Takes the slots of the next pass and returns its runs."""
        chosen = self._next_rows(limit)
        self._memory.extend(pool, (rows.lengths for rows in chosen))
        runs: list[Run] = []
        for rows in chosen:
            lane = rows.lane
            wants = lane.thread.is_open and not lane.moves
            block_rows = () if lane.block is None else lane.block.rows()
            runs += runs_of(lane.view, self._recorder.segments, rows.count, wants, block_rows)
        return runs

    def fed(self, runs: list[Run], logits: Float[Tensor, "logit_rows vocab"]) -> None:
        """A pass has fed the runs: lanes keep the logits of their rows. The lane of a closed
        thread that has nothing unfed any more is dropped."""
        self._next = None
        found = np.ascontiguousarray(logits.detach().numpy())
        at = 0
        for run in runs:
            thread = run.view.thread
            self._recorder.fed(thread, len(run.tokens))
            if run.num_logits:
                self._lanes[thread.name].logits = found[at : at + run.num_logits]
                at += run.num_logits
            if not thread.is_open and not thread.unfed:
                del self._lanes[thread.name]

    def skip(self, count: int) -> None:
        """Main's first `count` unfed tokens have slots, and their keys and values lie there."""
        self._next = None
        self._recorder.fed(self._recorder.threads[MAIN], count)

    def _next_rows(self, limit: int) -> list[LaneRows]:
        """The next unfed tokens; found once a pass, since nothing is placed before it."""
        if self._next is None or self._next[0] != limit:
            self._next = limit, self._find_rows(limit)
        return self._next[1]

    def _find_rows(self, limit: int) -> list[LaneRows]:
        """In the order of placing, up to `limit`; but blocks that see one another at once."""
        lanes = [lane for lane in self._lanes.values() if lane.thread.unfed]
        last = None
        if self._recorder.num_unfed > limit:
            last = self._last_order(lanes, limit)
        chosen = []
        for lane in lanes:
            count, lengths = 0, dict[int, int]()
            for unfed in lane.thread.unfed:
                if last is not None and unfed.order > last:
                    break
                count += 1
                lengths[unfed.segment] = unfed.index + 1
            if count:
                chosen.append(LaneRows(lane, count, lengths))
        return chosen

    def _last_order(self, lanes: list[Lane], limit: int) -> int:
        """The order of the last token of a pass: the `limit`-th one; before the blocks that it
        would cut in two, unless the pass begins with them."""
        unfed = sorted((u.order, u.segment) for lane in lanes for u in lane.thread.unfed)
        groups = [self._recorder.segments[segment].group for _, segment in unfed]
        last, group = unfed[limit - 1][0], groups[limit - 1]
        if group is None or group not in groups[limit:]:
            return last
        first = groups.index(group)
        end = len(groups) - groups[::-1].index(group)
        return unfed[(first if first else end) - 1][0]
