"""How an answer is awaited and sent: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Receive, Scope, Send

from stretto.completion import Completion
from stretto.runtime.events import Done, Event, Failed, Usage, to_json
from stretto.runtime.text import num_held
from stretto.server.asks import Ask
from stretto.server.engine import EngineLoop, Ticket
from stretto.server.errors import ApiError, too_late
from stretto.server.job import Job, Step
from stretto.server.order import DocumentOrder, Drawn
from stretto.server.schema import StreamOptions
from stretto.server.wire import Envelope, details_of, usage_of

T = TypeVar("T")
log = logging.getLogger("stretto.server")
PING_S = 15.0
"""A stream that has nothing to say says so this often, for what closes silent connections."""
CLIENT_GONE = 499


@dataclass
class Answer:
    """The samples of one request, as they are decoded. `close` gives everything back."""

    engine: EngineLoop
    ask: Ask
    envelope: Envelope
    ticket: Ticket
    wants_logprobs: bool
    wants_details: bool
    options: StreamOptions
    jobs: list[Job] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin(self, *, is_stream: bool) -> None:
        """Prepares and submits the samples. Raises `ApiError`."""
        deadline = time.perf_counter() + self.engine.settings.deadline_s
        streams = await self.aside(lambda: self.ask.prepare(self.engine.lm))
        self.jobs = [
            Job(
                stream, self.news, deadline,
                wants_text=is_stream, wants_steps=is_stream and self.options.threads,
            )
            for stream in streams
        ]  # fmt: skip
        self.engine.submit(self.jobs)

    def close(self) -> None:
        """Cancels what is not done."""
        for job in self.jobs:
            job.cancel()
        self.ticket.release()

    @property
    def is_done(self) -> bool:
        return all(job.progress.is_done for job in self.jobs)

    @property
    def completions(self) -> list[Completion]:
        """Those of samples that are done. For `aside`, as is all that looks at whole answers."""
        return [job.stream.completion for job in self.jobs]

    async def aside(self, make: Callable[[], T]) -> T:
        """What `make` makes off the event loop, in a thread of the pool, whose CPU time is
        counted."""

        def counted() -> T:
            begun = time.thread_time()
            try:
                return make()
            finally:
                self.engine.metrics.aside.inc(time.thread_time() - begun)

        return await run_in_threadpool(counted)

    def failure(self, job: Job) -> ApiError | None:
        """What a sample that is done ended with, if it is no answer."""
        reason = job.request.finish_reason
        if reason == "cancelled":
            late = too_late(self.engine.settings.deadline_s)
            return late if job.is_late else self.engine.refusal()
        if reason == "error":
            return ApiError(500, f"decoding failed: {job.request.error}", code="decoding_failed")
        return None


async def answer_whole(answer: Answer, request: Request) -> Response:
    """Waits for all samples; the client's leaving cancels them. Raises `ApiError`."""
    watch = asyncio.ensure_future(_until_gone(request, answer.news))
    try:
        while not answer.is_done:
            answer.news.clear()
            if not answer.is_done:
                await answer.news.wait()
            if watch.done():
                return Response(status_code=CLIENT_GONE)
    finally:
        watch.cancel()
    for job in answer.jobs:
        if (failure := answer.failure(job)) is not None:
            raise failure
    return await answer.aside(lambda: _whole(answer))


async def _until_gone(request: Request, news: asyncio.Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    news.set()


def _whole(answer: Answer) -> JSONResponse:
    completions = answer.completions
    choices = [_whole_choice(answer, i, c) for i, c in enumerate(completions)]
    usage = usage_of(completions, answer.ask.num_samples)
    return JSONResponse(answer.envelope.whole(choices, usage))


def _whole_choice(answer: Answer, index: int, completion: Completion) -> dict[str, Any]:
    shape, logprobs = answer.envelope.shape, None
    if answer.wants_logprobs:
        length = len(completion.text)
        tokens = DocumentOrder().push(completion.events)
        logprobs = shape.logprobs([t.cut(length) for t in tokens if t.start < length])
    choice = {"index": index, **shape.choice(completion.text, logprobs)}
    choice["finish_reason"] = completion.finish_reason
    if answer.wants_details:
        choice["stretto"] = details_of(completion)
    return choice


class EventStream(StreamingResponse):
    """Server-sent events. Ends when the client leaves, or takes nothing for `stall_s`; `close` is
    called however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], *, stall_s: float, close: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(chunks, headers=headers)
        self._stall_s = stall_s
        self._close = close

    async def stream_response(self, send: Send) -> None:
        async def timely(message: Message) -> None:
            async with asyncio.timeout(self._stall_s):
                await send(message)

        await super().stream_response(timely)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("a reader took nothing for %g s; its answer is cancelled", self._stall_s)
        finally:
            self._close()


async def answer_stream(answer: Answer) -> AsyncIterator[bytes]:
    """The chunks of an answer, as early as document order allows."""
    voices = [Voice(answer, index, job) for index, job in enumerate(answer.jobs)]
    for voice in voices:
        yield _sse(voice.opening())
    while True:
        answer.news.clear()
        is_done = answer.is_done
        for voice in voices:
            for chunk in voice.fresh():
                yield _sse(chunk)
            if voice.failure is not None:
                yield _sse(voice.failure.body())
                yield b"data: [DONE]\n\n"
                return
        if is_done:
            break
        try:
            async with asyncio.timeout(PING_S):
                await answer.news.wait()
        except TimeoutError:
            yield b": waiting\n\n"
    for end in await answer.aside(lambda: _ends(answer, voices)):
        yield end
    yield b"data: [DONE]\n\n"


def _ends(answer: Answer, voices: list[Voice]) -> list[bytes]:
    """The last chunks of choices that are done, and the usage if that is wanted."""
    completions = answer.completions
    ends = [voice.closing(c) for voice, c in zip(voices, completions, strict=True)]
    if answer.options.include_usage:
        usage = usage_of(completions, answer.ask.num_samples)
        ends.append(answer.envelope.chunk([], usage=usage))
    return [_sse(end) for end in ends]


def _sse(chunk: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


class Voice:
    """One choice of a stream: what of it has been sent.

    An end that a stop string could begin with is held back, since it may yet be cut off. After a
    failure nothing more is sent: text that was not stopped is not cut either.
    """

    def __init__(self, answer: Answer, index: int, job: Job) -> None:
        self.failure: ApiError | None = None
        self._answer = answer
        self._index = index
        self._job = job
        self._num_sent = 0
        self._num_events = 0
        self._num_steps = 0
        self._num_ordered = 0
        self._order = DocumentOrder()
        self._settled: deque[Drawn] = deque()  # and not sent

    def opening(self) -> dict[str, Any]:
        return self._chunk(self._delta("", None, is_first=True))

    def fresh(self) -> list[dict[str, Any]]:
        """Chunks with what is new: none, or one."""
        progress = self._job.progress
        if progress.is_done:
            self.failure = self._answer.failure(self._job)
        text, end = progress.text, self._num_sent
        if self.failure is None:
            held = 0 if progress.is_done else num_held(text, self._answer.ask.params.stop)
            end = max(end, len(text) - held)
        added, self._num_sent = text[self._num_sent : end], end
        tokens = self._tokens(progress.num_events)
        events = self._events(progress.num_events, progress.num_steps)
        logprobs = self._answer.envelope.shape.logprobs(tokens) if tokens else None
        choices = [self._delta(added, logprobs)] if added or tokens else []
        if not choices and not events:
            return []
        return [self._chunk(*choices, events=events)]

    def closing(self, completion: Completion) -> dict[str, Any]:
        """The last chunk, with the reason why the answer ends."""
        events: list[dict[str, Any]] = []
        if self._answer.options.threads:
            done = Done(completion.text, completion.finish_reason)
            events = [to_json(Usage(asdict(completion.usage))), to_json(done)]
        choice = self._delta("", None, completion.finish_reason)
        details = details_of(completion) if self._answer.wants_details else None
        return self._chunk(choice, events=events, details=details)

    def _tokens(self, num_events: int) -> list[Drawn]:
        """Tokens of the text that has been sent and whose log-probs have not."""
        if not self._answer.wants_logprobs:
            return []
        log = self._job.request.log.events
        self._settled += self._order.push(log[self._num_ordered : num_events])
        self._num_ordered = num_events
        length, is_last = self._num_sent, self._job.progress.is_done
        sent: list[Drawn] = []
        while self._settled:
            token = self._settled[0]
            if token.start >= length or not (is_last or token.end <= length):
                break
            sent.append(self._settled.popleft().cut(length))
        return sent

    def _events(self, num_events: int, num_steps: int) -> list[dict[str, Any]]:
        """Events and steps that have not been sent, in the order in which they happened."""
        if not self._answer.options.threads:
            return []
        log: list[Event] = self._job.request.log.events
        steps: list[Step] = self._job.steps[self._num_steps : num_steps]
        self._num_steps = num_steps
        found: list[dict[str, Any]] = []
        for step in steps:
            found += map(to_json, log[self._num_events : step.num_events])
            found.append(step.to_json())
            self._num_events = step.num_events
        found += map(to_json, log[self._num_events : num_events])
        self._num_events = num_events
        if self.failure is not None:
            found.append(to_json(Failed(self.failure.message)))
        return found

    def _delta(
        self, text: str, logprobs: Any, reason: str | None = None, *, is_first: bool = False
    ) -> dict[str, Any]:
        delta = self._answer.envelope.shape.delta(text, logprobs, is_first=is_first)
        return {"index": self._index, **delta, "finish_reason": reason}

    def _chunk(
        self,
        *choices: dict[str, Any],
        events: list[dict[str, Any]] | None = None,
        details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        more: dict[str, Any] = {"usage": None} if self._answer.options.include_usage else {}
        extension = {"events": events, "details": details}
        filled = {name: value for name, value in extension.items() if value}
        if filled:
            more["stretto"] = {"index": self._index, **filled}
        return self._answer.envelope.chunk(list(choices), **more)
