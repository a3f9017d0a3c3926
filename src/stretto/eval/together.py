"""Answers that nobody times: many prompts share each pass of each side's model.

The plain twin is `runner.Timer`, which decodes one request at a time. On a batch-invariant engine
both give the same answers, bit for bit; on others as near as the engine promises.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.eval.answers import Contestant, Interrupted
from stretto.eval.job import Job, Question

if TYPE_CHECKING:
    from stretto.completion import Completion
    from stretto.stream import Stream

AHEAD = 3
"""Times a batch of questions begun and not finished by all sides: a side with short answers runs
ahead of one with long ones, and a kill loses no more than these."""


@dataclass
class Meter:
    """What the passes of one side came to in this process: `tokens` were drawn, control tokens
    included, `text_tokens` of them have text, by answers that were finished in `seconds`."""

    batch: int
    answers: int = 0
    tokens: int = 0
    text_tokens: int = 0
    seconds: float = 0.0

    def add(self, completion: Completion) -> None:
        self.answers += 1
        self.tokens += sum(thread.num_tokens for thread in completion.threads)
        self.text_tokens += completion.usage.completion_tokens


def answer_together(
    job: Job,
    questions: Iterable[Question],
    is_interrupted: Callable[[], bool],
    meters: dict[str, Meter] | None = None,
) -> Iterator[tuple[Question, dict[str, Completion]]]:
    """Each question with an answer of each of its sides, in the order in which they are done.

    A question that some side could not answer comes not at all: what broke a pass broke it for all
    requests in it, so whose fault it was is found by decoding each alone. Raises `Interrupted`
    after Ctrl-C. What is under way when the iterator is left is cancelled. `meters` takes one of
    each side that shares its passes with no other.
    """
    lines = {name: _Line(side, job) for name, side in job.sides(job.arms).items()}
    if meters is not None:
        meters |= {name: line.meter for name, line in lines.items() if _is_alone(name, job)}
    waiting = deque(questions)
    under_way: list[_Asked] = []
    try:
        while waiting or under_way:
            if is_interrupted():
                raise Interrupted
            while waiting and len(under_way) < AHEAD * job.batch:
                asked = _Asked(waiting.popleft())
                under_way.append(asked)
                for name in job.sides(asked.question.arms):
                    asked.missing.add(name)
                    lines[name].waiting.append(asked)
            _step(lines)
            done = [asked for asked in under_way if not asked.missing]
            under_way = [asked for asked in under_way if asked.missing]
            for asked in done:
                if not asked.is_broken:
                    yield asked.question, asked.answers
    finally:
        for line in lines.values():
            line.close()


@dataclass
class _Asked:
    """A question under way. `is_broken`: some side could not answer it."""

    question: Question
    missing: set[str] = field(default_factory=set)
    answers: dict[str, Completion] = field(default_factory=dict)
    is_broken: bool = False


class _Line:
    """The questions of one side: those that wait, and those under way with their streams."""

    def __init__(self, contestant: Contestant, job: Job) -> None:
        self._contestant = contestant
        self._params = job.params
        self.meter = Meter(job.batch)
        self.waiting: deque[_Asked] = deque()
        self._running: list[tuple[_Asked, Stream]] = []

    def step(self) -> list[tuple[_Asked, Completion | None]]:
        """One pass over what is under way. What is done now, with None for what failed."""
        if not self.waiting and not self._running:
            return []
        began = time.perf_counter()
        done = self._advance()
        self.meter.seconds += time.perf_counter() - began
        for _, completion in done:
            if completion is not None:
                self.meter.add(completion)
        return done

    def _advance(self) -> list[tuple[_Asked, Completion | None]]:
        done: list[tuple[_Asked, Completion | None]] = []
        while self.waiting and len(self._running) < self.meter.batch:
            asked = self.waiting.popleft()
            question = asked.question
            try:
                stream = self._contestant.submit(
                    question.item.prompt, self._params, question.sample
                )
                self._running.append((asked, stream))
            except StrettoError:
                done.append((asked, None))
        if self._running:
            self._pass()
        for asked, stream in self._running:
            if stream.request.is_done:
                done.append((asked, _completion_of(stream)))
        self._running = [pair for pair in self._running if not pair[1].request.is_done]
        return done

    def _pass(self) -> None:
        """Of two sides with one model, each steps the requests of both: they are in one batch.
        What the first one fails with is its own, and looked at once it is done."""
        import torch

        with suppress(StrettoError, MemoryError, torch.OutOfMemoryError):
            self._contestant.lm.step(self._running[0][1].request)

    def close(self) -> None:
        for _, stream in self._running:
            stream.close()


def _completion_of(stream: Stream) -> Completion | None:
    """The answer of a request that is done; None if it failed for a reason that is not a bug."""
    import torch

    try:
        return stream.finish()
    except (StrettoError, MemoryError, torch.OutOfMemoryError):
        return None


def _is_alone(name: str, job: Job) -> bool:
    """Whether a side has a model to itself: the passes of one that is shared are nobody's own."""
    sides = job.sides(job.arms)
    own = sides[name].lm.scheduler
    return all(side.lm.scheduler is not own for key, side in sides.items() if key != name)


def _step(lines: Mapping[str, _Line]) -> None:
    """One pass of each side; what is done is noted with its question."""
    for name, line in lines.items():
        for asked, completion in line.step():
            asked.missing.discard(name)
            if completion is None:
                asked.is_broken = True
            else:
                asked.answers[name] = completion
