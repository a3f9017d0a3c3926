"""The samples of one request as they are decoded, and how they are awaited and sent whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive

from stretto.completion import Completion
from stretto.server.asks import Ask
from stretto.server.engine import EngineLoop, Ticket
from stretto.server.errors import ApiError, too_late
from stretto.server.job import Job, Tell
from stretto.server.order import DocumentOrder
from stretto.server.schema import StreamOptions
from stretto.server.wire import Envelope, details_of, usage_of

T = TypeVar("T")
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

    async def begin(self, tell: Tell, *, is_stream: bool) -> None:
        """Prepares and submits the samples. `tell` is called on this loop when they have ended, and
        for a stream after each pass that brings something new. Raises `ApiError`."""
        deadline = time.perf_counter() + self.engine.settings.deadline_s
        streams = await self.aside(lambda: self.ask.prepare(self.engine.lm))
        self.jobs = [
            Job(
                stream, tell, deadline,
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

        return await asyncio.get_running_loop().run_in_executor(None, counted)

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
    """Decodes and waits for all samples; the client's leaving cancels them. Raises `ApiError`."""
    news = asyncio.Event()
    await answer.begin(news.set, is_stream=False)
    watch = asyncio.ensure_future(until_gone(request.receive))
    watch.add_done_callback(lambda _: news.set())
    try:
        while not answer.is_done:
            news.clear()
            if not answer.is_done:
                await news.wait()
            if watch.done():
                return Response(status_code=CLIENT_GONE)
    finally:
        watch.cancel()
    for job in answer.jobs:
        if (failure := answer.failure(job)) is not None:
            raise failure
    return await answer.aside(lambda: _whole(answer))


async def until_gone(receive: Receive) -> None:
    """Waits until the client has left, or has been answered."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
