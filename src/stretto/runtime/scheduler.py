"""The loop: every ready thread of every request in one batch, one pass after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from traceback import clear_frames

from torch import Tensor

from stretto.engines.base import Engine, require
from stretto.errors import PromptTooLong, StrettoError
from stretto.runtime.policy import Policy
from stretto.runtime.pool import Pool
from stretto.runtime.prefixes import Sharing
from stretto.runtime.request import Request
from stretto.runtime.views import Run

MAX_ROWS = 512
"""Rows a request may bring to one pass; a longer prompt is fed in several."""


def check_policy(engine: Engine, policy: Policy) -> None:
    """Raises `Unsupported` unless the engine can do what the policy needs of it."""
    if policy.wants_attention:
        require(engine, "attention mass", f"method {policy.name!r}")
    if policy.is_reindexed:
        require(engine, "re-indexed positions", f"method {policy.name!r}")


class Scheduler:
    """Continuous batching over requests and their threads, oldest request first.

    Admission counts the pages that are free and reserves nothing. When pages run out the youngest
    running request is preempted whole, and comes back, bit for bit, before younger ones start. A
    request that outgrows the pool alone ends with "length".

    With `shares_prompts` a prompt takes over what lies in the pool of the same tokens, from running
    requests and, until its room is needed, from those that have ended (`Sharing`). It holds for one
    set of weights: `forget` where they change.

    What fails for one request ends that one with "error", and the error is its `failure`: whoever
    makes the pass is not told, and the others go on.

    What breaks a call off midway, such as Ctrl-C, leaves no trust in the books: the next call
    then ends every request with "error" and begins with an empty pool.
    """

    def __init__(
        self, engine: Engine, pool: Pool, max_rows: int = MAX_ROWS, *, shares_prompts: bool = False
    ) -> None:
        self.engine = engine
        self.pool = pool
        self.max_rows = max_rows
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self.forward_s = 0.0  # in `engine.forward`, failed passes aside
        self.sharing = Sharing(pool) if shares_prompts else None
        pool.stays_low = getattr(engine, "prefers_low_slots", False)
        self._is_midway = False

    def check(self, request: Request) -> None:
        """Raises `PromptTooLong` if it could not even start alone, `Unsupported`
        if the engine cannot do what its policy needs."""
        if request.policy is not None:
            check_policy(self.engine, request.policy)
        length, room = request.num_prompt_tokens, self.engine.max_positions
        if length >= room:
            raise PromptTooLong(
                f"the prompt has {length} tokens but the model has {room} positions, "
                "one of which must be left for the answer; shorten the prompt"
            )
        parts = [len(segment.tokens) for segment in request.recorder.segments]
        pages = sum(map(self.pool.pages_for, parts))
        if pages > self.pool.num_pages:
            need = pages * self.pool.page_size
            raise PromptTooLong(
                f"the prompt needs {need} KV slots but the pool has {self.pool.num_slots}; "
                "shorten the prompt or load the model with a larger pool"
            )

    def submit(self, request: Request) -> None:
        """Queues a request. Raises what `check` raises."""
        self.check(request)
        with self._midway():
            self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request now and frees its slots; the others are not touched."""
        with self._midway():
            self._end(request, "cancelled")

    def forget(self) -> None:
        """Nothing of requests that have begun is taken over by those that begin from now on."""
        if self.sharing is not None:
            with self._midway():
                self.sharing.forget([*self.running, *self.waiting])

    def step(self) -> bool:
        """One pass. False if there is nothing left to do."""
        with self._midway():
            for request in [r for r in (*self.running, *self.waiting) if r.is_abandoned]:
                self._end(request, "cancelled")
            self._admit()
            batch = self._reserve()
            if batch:
                self._run(batch)
        return bool(self.running or self.waiting)

    def check_integrity(self) -> None:
        """Raises `PoolError` unless the pages held are exactly the running requests'."""
        self.pool.check_integrity()
        held = sum(request.memory.num_pages for request in self.running)
        if held != self.pool.num_holds:
            raise AssertionError(f"requests hold {held} pages, the pool disagrees")
        if self.sharing is not None:
            self.sharing.prefixes.check_integrity()

    def _admit(self) -> None:
        if self.sharing is not None:
            self.sharing.update(self.running)
        if not self.waiting:
            return
        spoken_for = sum(r.feed.pages_needed(self.pool, self.max_rows) for r in self.running)
        for request in list(self.waiting):
            pages = [] if self.sharing is None else self.sharing.pages_for(request)
            if self.sharing is not None and self.sharing.is_worth_waiting(
                request, pages, self.max_rows
            ):
                continue
            need, free = self._pages_to_start(request, pages), self.pool.num_free_pages
            if spoken_for + need > free and self.running:
                return
            try:
                request.memory.restore(self.engine, self.pool)
            except Exception as error:
                self._end(request, "error", error)
                continue
            if self.sharing is not None:
                self.sharing.begin(request, pages)
            spoken_for += need - (free - self.pool.num_free_pages)
            self.running.append(request)
            self.waiting.remove(request)

    def _pages_to_start(self, request: Request, pages: list[int]) -> int:
        """Free pages that a waiting request takes to begin with `pages`, or to come back, and for
        its next pass."""
        if not pages:
            need = request.memory.pages_to_restore(self.pool)
            return need + request.feed.pages_needed(self.pool, self.max_rows)
        num_shared = len(pages) * self.pool.page_size
        length = min(request.num_prompt_tokens, num_shared + self.max_rows)
        return self.pool.pages_for(length) - len(pages) + self.pool.num_cached(pages)

    def _reserve(self) -> list[Request]:
        """The requests of this pass, oldest first, with pages for a whole step each."""
        batch: list[Request] = []
        spoken_for = 0
        for request in list(self.running):
            if request not in self.running:
                continue
            need = request.feed.pages_needed(self.pool, self.max_rows)
            while spoken_for + need > self.pool.num_free_pages and self.running[-1] is not request:
                self._preempt(self.running[-1])
            if spoken_for + need <= self.pool.num_free_pages:
                batch.append(request)
                spoken_for += need
            elif len(self.running) > 1:
                self._preempt(request)
            else:
                self._end(request, "length")
        return batch

    def _preempt(self, request: Request) -> None:
        try:
            request.memory.save(self.engine, self.pool)
        except Exception as error:
            self._end(request, "error", error)
            return
        self.waiting.insert(0, request)
        self.running.remove(request)
        self.num_preemptions += 1

    def _run(self, batch: list[Request]) -> None:
        """Feeds a batch."""
        runs = [request.feed.allocate(self.pool, self.max_rows) for request in batch]
        for request, own, logits in zip(batch, runs, self._forward(runs), strict=True):
            try:
                if isinstance(logits, Exception):
                    raise logits
                request.fed(own, logits, self.pool)
            except Exception as error:
                self._end(request, "error", error)
        self.running = [r for r in self.running if not r.is_done]

    def _forward(self, runs: list[list[Run]]) -> list[Tensor | Exception]:
        """The logits of each request. Where a pass of all of them fails each is fed alone, into
        the same slots, so that only those at fault fail."""
        begun = time.perf_counter()
        try:
            logits = self.engine.forward([run for own in runs for run in own])
            self.forward_s += time.perf_counter() - begun
        except Exception as error:
            clear_frames(error.__traceback__)  # which hold all tensors of the pass
            if len(runs) == 1:
                return [error]
            return [result for own in runs for result in self._forward([own])]
        counts = [sum(run.num_logits for run in own) for own in runs]
        ends = accumulate(counts)
        return [logits[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def _end(self, request: Request, reason: str, failure: Exception | None = None) -> None:
        """Ends a request, whatever state it was left in. It is in a list until it has ended."""
        try:
            request.end(reason, self.pool, failure)
        except Exception as error:
            request.abort(error if failure is None else failure)
            request.memory.free(self.pool)
        self.running = [r for r in self.running if r is not request]
        self.waiting = [r for r in self.waiting if r is not request]

    @contextmanager
    def _midway(self) -> Iterator[None]:
        """Around every change of the books. Left by an exception, they stay midway."""
        if self._is_midway:
            self._start_over()
        self._is_midway = True
        yield
        self._is_midway = False

    def _start_over(self) -> None:
        for request in (*self.running, *self.waiting):
            request.abort(StrettoError("another call was interrupted; ask again"))
        self.running, self.waiting = [], []
        self.pool.reset()
        if self.sharing is not None:
            self.sharing.reset()
