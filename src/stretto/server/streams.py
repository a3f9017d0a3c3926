"""How an answer is sent while it is written: as server-sent events.

What a pass has brought is written by the very callback that tells of it, without waking a task,
where the server offers `WRITE` and the client takes what it is sent. Else a task does so. Such a
callback tells all streams of a pass before any of them writes: each writing wakes a client, and to
go back and forth between the two costs more than either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from stretto.server.answers import Answer, until_gone
from stretto.server.errors import ApiError
from stretto.server.voice import Voice
from stretto.server.wire import event_of, usage_of

log = logging.getLogger("stretto.server")
PING_S = 15.0
"""A stream that has nothing to say says so this often, for what closes silent connections."""
PING = b": waiting\n\n"
LAST = b"data: [DONE]\n\n"
WRITE = "stretto.write"
"""Of a scope's `extensions`: writes a part of the body of an answer that has begun and returns
True, or does nothing, since that may have to wait, and returns False."""
Write = Callable[[bytes], bool]


def _waits(_: bytes) -> bool:
    """The `Write` of a server that offers none."""
    return False


class EventStream(Response):
    """Ends when the client leaves, or takes nothing for `stall_s`; closes the answer however it
    ends."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer = answer
        self._stall_s = answer.engine.settings.stall_s
        self._voices: list[Voice] = []
        self._write: Write = _waits
        self._news = asyncio.Event()
        self._may_write = False  # the callback, since the task waits for news
        self._is_over = False  # all of it has been taken from the voices
        self._has_ended = False  # the task has the last part
        self._has_left = False  # the client
        self._left = b""  # taken from the voices and not sent
        self._failure: ApiError | None = None
        self._bug: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()

    async def begin(self) -> None:
        """Prepares and submits the samples. Raises `ApiError`."""
        await self._answer.begin(self._tell, is_stream=True)
        self._voices = [Voice(self._answer, *each) for each in enumerate(self._answer.jobs)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write = scope.get("extensions", {}).get(WRITE, _waits)
        watch = asyncio.ensure_future(until_gone(receive))
        watch.add_done_callback(self._leave)
        try:
            await self._send(send)
        except TimeoutError:
            log.warning("a reader took nothing for %g s; its answer is cancelled", self._stall_s)
        finally:
            self._answer.close()
            watch.cancel()

    # -- callbacks -----------------------------------------------------------------------------

    def _leave(self, _: object) -> None:
        """The client has left, or has been answered."""
        self._has_left = True
        self._answer.close()
        self._wake()

    def _tell(self) -> Callable[[], None] | None:
        """There is something new, or the answer has ended. What is to be called to write it. Leaves
        to the task what may wait, and what ends it."""
        if not self._may_write:
            self._news.set()
            return None
        try:
            self._left = self._take()
        except Exception as bug:
            self._bug = bug
        if self._is_over or self._bug is not None:
            self._wake()
            return None
        return self._put if self._left else None

    def _put(self) -> None:
        if self._write(self._left):
            self._left = b""
            self._sent_at = self._loop.time()
        else:
            self._wake()

    def _wake(self) -> None:
        self._may_write = False
        self._news.set()

    def _take(self) -> bytes:
        """What has not been sent; notes whether that is all, as it is after a failure."""
        taken, is_over = self._left, True
        self._left = b""
        for voice in self._voices:
            taken += voice.fresh()
            is_over &= voice.is_over
            if self._failure is None:
                self._failure = voice.failure
        self._is_over = is_over or self._failure is not None
        return taken

    # -- the task ------------------------------------------------------------------------------

    async def _send(self, send: Send) -> None:
        """All of it, unless the client leaves. Raises `TimeoutError` if it takes nothing."""

        async def timely(*messages: Message) -> None:
            async with asyncio.timeout(self._stall_s):
                for message in messages:
                    await send(message)
            self._sent_at = self._loop.time()

        def part(data: bytes) -> Message:
            return {"type": "http.response.body", "body": data, "more_body": not self._has_ended}

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await timely(start, part(b"".join([voice.opening() for voice in self._voices])))
        while not self._has_ended:
            data = await self._more()
            if self._has_left:
                return
            await timely(part(data))

    async def _more(self) -> bytes:
        """What to send next, once there is something or the client has left."""
        while not self._has_left:
            if self._bug is not None:
                raise self._bug
            data = self._take()
            if self._is_over:
                self._has_ended = True
                if self._failure is not None:
                    return data + event_of(self._failure.body()) + LAST
                return data + await self._answer.aside(self._ends) + LAST
            if data:
                return data
            if not await self._has_news():
                return PING
        return b""

    async def _has_news(self) -> bool:
        """Waits for news; False if for `PING_S` nothing was sent."""
        self._news.clear()
        self._may_write = True
        try:
            while (end := self._sent_at + PING_S) > self._loop.time():
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(end):
                        return await self._news.wait()
        finally:
            self._may_write = False
        return False

    def _ends(self) -> bytes:
        """The last chunks of choices that are done, and the usage if that is wanted."""
        answer = self._answer
        completions = answer.completions
        ends = [voice.closing(c) for voice, c in zip(self._voices, completions, strict=True)]
        if answer.options.include_usage:
            usage = usage_of(completions, answer.ask.num_samples)
            ends.append(event_of(answer.envelope.chunk([], usage=usage)))
        return b"".join(ends)
