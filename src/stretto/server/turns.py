"""Whose samples are queued next, so that a request of many leaves turns to those of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.server.job import Job

if TYPE_CHECKING:
    from stretto.runtime.request import Request


class Turns:
    """Samples on their way to the scheduler, which starts them in the order in which they come.

    Of one request as many wait there as are running, and one at least; the others are held here.
    So its share doubles as long as there is room, and who asks after it waits for what it has
    under way, not for all that it has asked for.
    """

    def __init__(self) -> None:
        self._shares: list[_Share] = []

    @property
    def num_held(self) -> int:
        """Samples that have not been handed on. Safe to read from any thread."""
        return sum(len(share.held) for share in self._shares)

    def add(self, jobs: Iterable[Job]) -> None:
        """The samples of one request."""
        self._shares.append(_Share(deque(jobs)))

    def due(self, waiting: Iterable[Request]) -> list[Job]:
        """What is to be queued now, in order, beside what is `waiting` in the scheduler."""
        if not self._shares:
            return []
        still = set(waiting)
        due = [job for share in self._shares for job in share.take(still)]
        self._shares = [share for share in self._shares if share.held]
        return due


@dataclass(slots=True, eq=False)
class _Share:
    """The samples of one request that are `held`, and those handed on."""

    held: deque[Job]
    handed: list[Job] = field(default_factory=list)

    def take(self, waiting: Set[Request]) -> list[Job]:
        """All that are due. Samples that nobody waits for any more are due at once: the scheduler
        ends them."""
        self.handed = [job for job in self.handed if not job.request.is_done]
        num_waiting = sum(job.request in waiting for job in self.handed)
        num = max(1, len(self.handed) - num_waiting) - num_waiting
        if self.held[0].request.is_abandoned:
            num = len(self.held)
        due = [self.held.popleft() for _ in range(min(num, len(self.held)))]
        self.handed += due
        return due
