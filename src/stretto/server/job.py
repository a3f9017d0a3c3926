"""One sample being answered, as the engine thread and the handler that waits for it share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from stretto.errors import StrettoError
from stretto.recorder import OpenThread

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.runtime.request import Request
    from stretto.stream import Stream

Tell = Callable[[], Callable[[], None] | None]
"""Tells a reader that there is something new. What it returns is called once all are told."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a reader may see: taken between two passes, so never half of a step.

    `text` is settled, in document order, cut at a stop string. The first `num_events` events of
    the request's log and the first `num_steps` steps of the job have happened.
    """

    text: str = ""
    num_events: int = 0
    num_steps: int = 0
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a request's clock, after `num_events` of its events.

    `time_s` counts from its submission. `live` has the tokens that the next token of each open
    thread sees, itself left out; `dense_tokens` what it would see with nothing hidden, in one
    thread; `held_slots` the KV slots that the request holds.
    """

    type: ClassVar[str] = "step"
    step: int
    time_s: float
    live: dict[str, int]
    dense_tokens: int
    held_slots: int
    num_events: int

    def to_json(self) -> dict[str, Any]:
        names = ("type", "step", "time_s", "live", "dense_tokens", "held_slots")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True, eq=False)
class Job:
    """A sample. `tell` is called on `loop` when `progress` has changed, once for all jobs that
    share it, as those of an answer do. With `wants_text` that is after each pass, else at the end;
    `wants_steps` keeps steps too.
    """

    stream: Stream
    tell: Tell
    deadline: float
    wants_text: bool = False
    wants_steps: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    progress: Progress = field(default_factory=Progress)
    steps: list[Step] = field(default_factory=list)
    is_late: bool = False
    _seen: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        return self.stream.request

    def cancel(self) -> None:
        """The next pass ends the request, if it is not done. Safe from any thread."""
        self.request.is_abandoned = True

    def publish(self, lm: LM) -> bool:
        """Brings `progress` up to date; whether the request is done. For the engine thread."""
        request = self.request
        before = self.progress
        with lm.between_passes:  # which another user of the model may run
            is_done, text = request.is_done, before.text
            if is_done or self.wants_text:
                request.document.settle()
                text = request.text
            if self.wants_steps and request.step > (self.steps[-1].step if self.steps else 0):
                self.steps.append(self._step(request, lm.scheduler.pool.page_size))
            num_events = len(request.log.events)
        if is_done or num_events != before.num_events or len(text) != len(before.text):
            self.progress = Progress(text, num_events, len(self.steps), is_done)
        return is_done

    def give_up(self, lm: LM) -> None:
        """Ends the request, and with it the answer, whatever state they are in."""
        try:
            lm.cancel(self.request)
        except Exception:
            self.request.abort(StrettoError("the engine has stopped"))
        self.progress = replace(self.progress, is_done=True)

    def _step(self, request: Request, page_size: int) -> Step:
        threads = request.recorder.threads.values()
        return Step(
            step=request.step,
            time_s=round(time.perf_counter() - request.timing.submitted, 6),
            live={t.name: self._num_seen(request, t) for t in threads if t.is_open},
            dense_tokens=request.recorder.num_placed,
            held_slots=request.memory.num_pages * page_size,
            num_events=len(request.log.events),
        )

    def _num_seen(self, request: Request, thread: OpenThread) -> int:
        """Tokens that a thread sees; counted anew only where its view has changed."""
        bits, own, known = self._seen.get(thread.name, (0, -1, 0))
        if (bits, own) != (thread.bits, thread.own.handle):
            segments = request.recorder.segments
            known = sum(len(segments[handle].tokens) for handle in thread.sees)
            self._seen[thread.name] = thread.bits, thread.own.handle, known
        return known + len(thread.own.tokens)
