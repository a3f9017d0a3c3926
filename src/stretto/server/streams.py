"""How an answer is sent while it is written: as server-sent events.

What a pass has brought is written by the very callback that tells of it, without waking a task,
where the server offers `WRITE` and the client takes what it is sent. Else a task does so.
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
        self._write: Write | None = None
        self._news = asyncio.Event()
        self._is_waiting = False  # the task: for news
        self._is_over = False
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
        self._write = scope.get("extensions", {}).get(WRITE)
        tasks = [asyncio.ensure_future(each) for each in (self._send(send), until_gone(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._answer.close()
            for task in tasks:
                task.cancel()
            sending, _ = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(sending, TimeoutError):
            log.warning("a reader took nothing for %g s; its answer is cancelled", self._stall_s)
        elif isinstance(sending, Exception):
            raise sending

    # -- the callback --------------------------------------------------------------------------

    def _tell(self) -> None:
        """There is something new, or the answer has ended. Leaves to the task what may wait, and
        what ends it."""
        if self._write is None or not self._is_waiting or self._news.is_set():
            self._news.set()
            return
        try:
            is_done = self._answer.is_done
            self._left = self._take()
            if is_done or self._failure is not None:
                self._news.set()
            elif self._left:
                if self._write(self._left):
                    self._left = b""
                    self._sent_at = self._loop.time()
                else:
                    self._news.set()
        except Exception as bug:
            self._bug = bug
            self._news.set()

    def _take(self) -> bytes:
        """What has not been sent; notes a failure, after which there is no more."""
        taken = self._left
        self._left = b""
        for voice in self._voices:
            taken += voice.fresh().encode()
            if self._failure is None:
                self._failure = voice.failure
        return taken

    # -- the task ------------------------------------------------------------------------------

    async def _send(self, send: Send) -> None:
        """All of it. Raises `TimeoutError` if the reader takes nothing."""

        async def timely(message: Message) -> None:
            async with asyncio.timeout(self._stall_s):
                await send(message)
            self._sent_at = self._loop.time()

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await timely(start)
        data = "".join([voice.opening() for voice in self._voices]).encode()
        while not self._is_over:
            await timely({"type": "http.response.body", "body": data, "more_body": True})
            data = await self._more()
        await timely({"type": "http.response.body", "body": data + LAST, "more_body": False})

    async def _more(self) -> bytes:
        """What to send next, once there is something. The last of it sets `is_over`."""
        while True:
            is_done = self._answer.is_done
            data = self._take()
            if self._failure is not None:
                self._is_over = True
                return data + event_of(self._failure.body()).encode()
            if is_done:
                self._is_over = True
                return data + await self._answer.aside(self._ends)
            if data:
                return data
            if not await self._has_news():
                return PING

    async def _has_news(self) -> bool:
        """Waits for news; False if for `PING_S` nothing was sent."""
        self._news.clear()
        self._is_waiting = True
        try:
            while (end := self._sent_at + PING_S) > self._loop.time():
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(end):
                        return await self._news.wait()
        finally:
            self._is_waiting = False
        return False

    def _ends(self) -> bytes:
        """The last chunks of choices that are done, and the usage if that is wanted."""
        answer = self._answer
        completions = answer.completions
        ends = [voice.closing(c) for voice, c in zip(self._voices, completions, strict=True)]
        if answer.options.include_usage:
            usage = usage_of(completions, answer.ask.num_samples)
            ends.append(event_of(answer.envelope.chunk([], usage=usage)))
        return "".join(ends).encode()
