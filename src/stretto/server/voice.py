"""One choice of a stream: what of it has been sent, and what is to be sent next."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import Any

from stretto.completion import Completion
from stretto.runtime.events import Done, Event, Failed, Usage, to_json
from stretto.runtime.text import num_held
from stretto.server.answers import Answer
from stretto.server.errors import ApiError
from stretto.server.job import Job, Progress, Step
from stretto.server.order import DocumentOrder, Drawn
from stretto.server.wire import MARK, Piece, details_of, event_of


class Voice:
    """Gives server-sent events, each with one chunk. `is_over` once all of the choice has been
    given but its `closing`.

    An end that a stop string could begin with is held back, since it may yet be cut off. After a
    failure nothing more is sent: text that was not stopped is not cut either.
    """

    def __init__(self, answer: Answer, index: int, job: Job) -> None:
        self.failure: ApiError | None = None
        self.is_over = False
        self._answer = answer
        self._index = index
        self._job = job
        self._seen: Progress | None = None
        self._num_sent = 0
        self._num_events = 0
        self._num_steps = 0
        self._num_ordered = 0
        self._order = DocumentOrder()
        self._settled: deque[Drawn] = deque()  # and not sent
        self._piece = Piece(self._chunk(self._delta(MARK, MARK)))

    def opening(self) -> bytes:
        return event_of(self._chunk(self._delta("", None, is_first=True)))

    def fresh(self) -> bytes:
        """What is new: nothing, or one chunk."""
        progress = self._job.progress
        if progress is self._seen:
            return b""
        self._seen = progress
        if progress.is_done:
            self.is_over = True
            self.failure = self._answer.failure(self._job)
        answer = self._answer
        text = self._text(progress)
        tokens = self._tokens(progress) if answer.wants_logprobs else []
        events = self._events(progress) if answer.options.threads else []
        logprobs = answer.envelope.shape.logprobs(tokens) if tokens else None
        if text and not events:
            return self._piece.event(text, logprobs)
        if not (text or tokens or events):
            return b""
        choices = [self._delta(text, logprobs)] if text or tokens else []
        return event_of(self._chunk(*choices, events=events))

    def closing(self, completion: Completion) -> bytes:
        """The last chunk, with the reason why the answer ends."""
        events: list[dict[str, Any]] = []
        if self._answer.options.threads:
            done = Done(completion.text, completion.finish_reason)
            events = [to_json(Usage(asdict(completion.usage))), to_json(done)]
        choice = self._delta("", None, completion.finish_reason)
        details = details_of(completion) if self._answer.wants_details else None
        return event_of(self._chunk(choice, events=events, details=details))

    def _text(self, progress: Progress) -> str:
        """Text that has not been sent and may be."""
        if self.failure is not None:
            return ""
        text, begin, stop = progress.text, self._num_sent, self._answer.ask.params.stop
        end = len(text)
        if stop and not progress.is_done:
            end = max(begin, end - num_held(text, stop))
        self._num_sent = end
        return text[begin:end]

    def _tokens(self, progress: Progress) -> list[Drawn]:
        """Tokens of the text that has been sent and whose log-probs have not."""
        log = self._job.request.log.events
        self._settled += self._order.push(log[self._num_ordered : progress.num_events])
        self._num_ordered = progress.num_events
        length, is_last = self._num_sent, progress.is_done
        sent: list[Drawn] = []
        while self._settled:
            token = self._settled[0]
            if token.start >= length or not (is_last or token.end <= length):
                break
            sent.append(self._settled.popleft().cut(length))
        return sent

    def _events(self, progress: Progress) -> list[dict[str, Any]]:
        """Events and steps that have not been sent, in the order in which they happened."""
        log: list[Event] = self._job.request.log.events
        steps: list[Step] = self._job.steps[self._num_steps : progress.num_steps]
        self._num_steps = progress.num_steps
        found: list[dict[str, Any]] = []
        for step in steps:
            found += map(to_json, log[self._num_events : step.num_events])
            found.append(step.to_json())
            self._num_events = step.num_events
        found += map(to_json, log[self._num_events : progress.num_events])
        self._num_events = progress.num_events
        if self.failure is not None:
            found.append(to_json(Failed(self.failure.message)))
        return found

    def _delta(
        self, text: str, logprobs: Any, reason: str | None = None, *, is_first: bool = False
    ) -> dict[str, Any]:
        delta = self._answer.envelope.shape.delta(text, logprobs, is_first=is_first)
        return {"index": self._index, **delta, "finish_reason": reason}

    def _chunk(self, *choices: dict[str, Any], **extension: Any) -> dict[str, Any]:
        more: dict[str, Any] = {"usage": None} if self._answer.options.include_usage else {}
        filled = {name: value for name, value in extension.items() if value}
        if filled:
            more["stretto"] = {"index": self._index, **filled}
        return self._answer.envelope.chunk(list(choices), **more)
