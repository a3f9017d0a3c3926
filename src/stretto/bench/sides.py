"""One side of a comparison of decoding: sequences that go on from one prompt, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stretto.bench.program import ForkProgram, Target, child_name, drawn_tokens
from stretto.errors import StrettoError
from stretto.params import SamplingParams
from stretto.recorder import MAIN
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from stretto.runtime.views import Run


@dataclass(frozen=True)
class Task:
    """A prompt, and per run one start token for each sequence that goes on from it, greedily, for
    `num_steps` timed steps."""

    prompt: list[int]
    bursts: list[list[int]]
    num_steps: int

    @property
    def num_rows(self) -> int:
        """The most sequences of a run."""
        return max(map(len, self.bursts))

    @property
    def num_positions(self) -> int:
        return len(self.prompt) + self.num_steps + 2

    @property
    def num_slots(self) -> int:
        return len(self.prompt) + self.num_rows * (self.num_steps + 2)


@dataclass(frozen=True, eq=False)
class Decoded:
    """One run: seconds of its timed steps, the tokens of each sequence, and the logits of the
    untimed first step, rows x vocab."""

    seconds: float
    tokens: list[list[int]]
    first_logits: NDArray[np.float32]


class Side(Protocol):
    """Decodes a task. `open` computes the prompt, once; each `run` takes the next burst, feeds its
    starts in a first step, which is not timed, and then what it has drawn, `num_steps` times."""

    name: str

    def open(self, task: Task) -> None: ...
    def run(self) -> Decoded: ...
    def close(self) -> None: ...


@contextmanager
def opened(side: Side, task: Task) -> Iterator[Side]:
    side.open(task)
    try:
        yield side
    finally:
        side.close()


class OwnSide:
    """Stretto: the sequences are threads forked from one request, a burst a run."""

    def __init__(self, target: Target) -> None:
        self.name = f"stretto {target.engine.name} {target.dtype}"
        self.target = target
        self._engine = _Tapped(target.engine)

    def open(self, task: Task) -> None:
        self.target.check_room(task.num_positions, task.num_slots)
        self._task = task
        self._next = self._num_threads = 0
        bursts = [*task.bursts, task.bursts[-1]]  # one more: the last run ends like the others
        program = ForkProgram(bursts, task.num_steps + 1, keeps_last=False)
        last = task.prompt[-1]
        self._request = Request(
            task.prompt[:-1],
            program,
            SamplingParams(max_tokens=2 + sum(map(len, bursts)) * (task.num_steps + 1)),
            decode=self.target.decode,
            end_ids=frozenset(),
            max_positions=self.target.engine.max_positions,
            script=lambda thread, index: last if thread == MAIN else None,
        )
        self._scheduler = Scheduler(self._engine, Pool(self.target.engine.num_slots))
        self._scheduler.submit(self._request)
        while self._request.step < 1 and not self._request.is_done:
            self._scheduler.step()
        if self._request.is_done:
            why = self._request.error or self._request.finish_reason
            raise StrettoError(
                f"{self.name}: the prompt of {len(task.prompt)} tokens ended with {why!r}; "
                "ask for less context"
            )

    def run(self) -> Decoded:
        task, num_rows = self._task, len(self._task.bursts[self._next])
        self._next += 1
        self._scheduler.step()
        logits = self._engine.logits
        start = time.perf_counter()
        for _ in range(task.num_steps):
            self._scheduler.step()
        seconds = time.perf_counter() - start
        self._request.check()
        if logits is None or len(logits) != num_rows:
            raise AssertionError("a pass did not have one row with logits per sequence")
        names = [child_name(self._num_threads + i) for i in range(num_rows)]
        self._num_threads += num_rows
        tokens = [drawn_tokens(self._request, name) for name in names]
        return Decoded(seconds, tokens, logits.numpy())

    @property
    def peak_slots(self) -> int:
        """The most KV slots held at once since `open`."""
        return self._request.memory.peak_pages

    def close(self) -> None:
        self._scheduler.cancel(self._request)


class _Tapped:
    """An engine whose last logits can be read."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.logits: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, runs: list[Run]) -> Tensor:
        self.logits = self._engine.forward(runs)
        return self.logits
