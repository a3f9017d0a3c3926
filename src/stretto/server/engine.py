"""The one thread that decodes for all clients, and what it shares with those who wait for it.

Handlers, on their event loops, prepare requests and read progress; the engine thread queues them,
runs pass after pass, and after each one publishes what a reader may see. It never waits for a
reader: what an answer has written stays in the request itself, so a slow reader costs no more than
the answer's own size, and finds all that has come in the meantime in one piece.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from stretto.server.errors import ApiError, queue_full, shutting_down, stopped
from stretto.server.job import Job, Progress, Tell
from stretto.server.metrics import Metrics
from stretto.server.settings import Settings
from stretto.server.turns import Turns

if TYPE_CHECKING:
    from stretto.lm import LM

log = logging.getLogger("stretto.server")
MAX_RETRY_AFTER_S = 60


class Ticket:
    """The right to have `num` samples under way; given back once, by `release`."""

    def __init__(self, engine: EngineLoop, num: int) -> None:
        self._engine = engine
        self._num = num

    def release(self) -> None:
        num, self._num = self._num, 0
        self._engine.readmit(num)


class EngineLoop:
    """Decodes jobs in batches of all that are under way. Safe to call from any thread."""

    def __init__(self, lm: LM, settings: Settings, metrics: Metrics) -> None:
        self.lm = lm
        self.settings = settings
        self.metrics = metrics
        self.num_admitted = 0
        self.is_draining = False
        self._ends_at = math.inf
        self._is_closed = False
        self._has_died = False
        self._mean_s = 1.0
        self._inbox: deque[list[Job]] = deque()
        self._turns = Turns()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    # -- admission -----------------------------------------------------------------------------

    def admit(self, num: int) -> Ticket:
        """Counts the `num` samples of a request as under way. Raises `ApiError`: 429 if that is
        too many at once, 503 if the server is shutting down."""
        if self.is_draining or not self.is_alive:
            raise self.refusal()
        with self._changed:
            limit = self.settings.max_requests if num == 1 else self.settings.max_samples
            if self.num_admitted + num > limit:
                self.metrics.refused.inc()
                raise queue_full(num, self.num_admitted, limit, self._retry_after_s())
            self.num_admitted += num
        return Ticket(self, num)

    @property
    def num_held(self) -> int:
        """Samples admitted whose turn to be queued has not come."""
        return self._turns.num_held

    def readmit(self, num: int) -> None:
        """Samples of a ticket are not under way any more."""
        with self._changed:
            self.num_admitted -= num

    def refusal(self) -> ApiError:
        """Why nothing is answered any more."""
        return shutting_down() if self.is_draining else stopped()

    def _retry_after_s(self) -> int:
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._mean_s)))

    # -- life ----------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered: the thread runs, or will with the first of them."""
        return not (self._is_closed or self._has_died)

    def start(self) -> None:
        """Starts the thread unless it runs. One that was closed starts anew."""
        with self._changed:
            if self._thread is not None and self._thread.is_alive():
                return
            self._is_closed = self._has_died = self.is_draining = False
            self._ends_at = math.inf
            self._turns = Turns()
            self._thread = threading.Thread(target=self._run, name="stretto-engine", daemon=True)
            self._thread.start()

    def submit(self, jobs: Iterable[Job]) -> None:
        """Hands the jobs of one request to the engine thread, which queues them before its next
        pass, or as their turn comes. Raises `ApiError` if it has ended since they were
        admitted."""
        if self._thread is None:
            self.start()
        with self._changed:
            if not self.is_alive:
                raise self.refusal()
            self._inbox.append(list(jobs))
            self._changed.notify()

    @property
    def is_finishing(self) -> bool:
        """Whether requests are under way that have time left, after a `drain`."""
        return self.num_admitted > 0 and time.perf_counter() < self._ends_at

    def drain(self) -> None:
        """No more requests are admitted; those under way are cancelled after `drain_s`. Takes no
        lock, so that a signal handler may call it; a second time it changes nothing."""
        if not self.is_draining:
            self._ends_at = time.perf_counter() + self.settings.drain_s
            self.is_draining = True

    def close(self) -> None:
        """Cancels what is under way and ends the thread."""
        self.is_draining = True
        self._ends_at = 0.0
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        jobs: list[Job] = []
        try:
            while (fresh := self._take(may_wait=not jobs)) is not None:
                begun = time.perf_counter()
                jobs += chain.from_iterable(fresh)
                self._queue(fresh)
                fresh.clear()  # what ends in this pass is not kept until somebody asks again
                pass_s = self._pass(jobs)
                jobs = self._publish(jobs)
                self.metrics.between.inc(time.perf_counter() - begun - pass_s)
        except BaseException:
            log.exception("the engine thread has died")
            with self._changed:
                self._has_died = True
                jobs += chain.from_iterable(self._inbox)
                self._inbox.clear()
            for job in jobs:
                job.give_up(self.lm)
            self._wake(jobs)

    def _take(self, *, may_wait: bool) -> list[list[Job]] | None:
        """New requests' jobs; None once the engine is closed and nothing is under way."""
        with self._changed:
            while may_wait and not self._inbox and not self._is_closed:
                self._changed.wait()
            if self._is_closed and may_wait and not self._inbox:
                return None
            fresh = list(self._inbox)
            self._inbox.clear()
            return fresh

    def _queue(self, fresh: list[list[Job]]) -> None:
        """Queues what is due, of new requests and of earlier ones."""
        for jobs in fresh:
            self._turns.add(jobs)
        for job in self._turns.due(self.lm.scheduler.waiting):
            try:
                self.lm.queue(job.stream)
            except Exception as error:
                log.exception("a request could not be queued")
                job.request.abort(error)

    def _pass(self, jobs: list[Job]) -> float:
        """One pass for all, and its seconds. What a request fails with is told when it is
        counted."""
        now = time.perf_counter()
        for job in jobs:
            if now > job.deadline and not job.request.is_done:
                job.is_late = True
                job.cancel()
            elif now > self._ends_at:
                job.cancel()
        request = next((job.request for job in jobs if not job.request.is_done), None)
        if request is None:
            return 0.0
        begun = time.perf_counter()
        try:
            self.lm.step(request)
        except Exception as error:
            if error is not request.failure:
                self.metrics.failures.inc()
                log.exception("a pass failed; all requests end with it")
        pass_s = time.perf_counter() - begun
        self.metrics.passes.observe(pass_s)
        return pass_s

    def _publish(self, jobs: list[Job]) -> list[Job]:
        """Shows readers what is new, and returns the jobs that are not done."""
        left, changed = [], []
        for job in jobs:
            was: Progress = job.progress
            if not job.publish(self.lm):
                left.append(job)
            else:
                self._count(job)
            if job.progress is not was and (job.wants_text or job.progress.is_done):
                changed.append(job)
        self._wake(changed)
        return left

    def _wake(self, jobs: list[Job]) -> None:
        """Tells the readers of jobs that there is something new."""
        loops: dict[asyncio.AbstractEventLoop, list[Job]] = {}
        for job in jobs:
            loops.setdefault(job.loop, []).append(job)
        for loop, own in loops.items():
            try:
                loop.call_soon_threadsafe(_tell_all, dict.fromkeys(job.tell for job in own))
            except RuntimeError:  # the loop is closed: nobody reads
                for job in own:
                    job.cancel()

    def _count(self, job: Job) -> None:
        if (failure := job.request.failure) is not None:
            log.error("a request failed; the others go on", exc_info=failure)
        timing = job.request.timing
        if timing.finished is not None:
            self._mean_s += 0.2 * (timing.finished - timing.submitted - self._mean_s)
        self.metrics.finished(job.request)


def _tell_all(readers: Iterable[Tell]) -> None:
    """Tells all of them first, and then does what they leave to do."""
    for act in [act for tell in readers if (act := tell()) is not None]:
        act()
