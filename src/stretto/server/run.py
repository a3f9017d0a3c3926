"""Running the application in this process, until it is told to end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import HANDLED_SIGNALS

from stretto.errors import InvalidInput
from stretto.server.errors import ApiError
from stretto.server.streams import WRITE

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stretto.server.engine import EngineLoop

MAX_HEADER_BYTES = 16 << 10
KEEP_ALIVE_S = 30
LINGER_S = 10
"""What connections get to take the rest of their answers, once all requests have ended."""
TICK_S = 0.05
BACKLOG = 2048


class Protocol(H11Protocol):
    """HTTP/1.1 that waits for no client without end, and whose refusals have a body like all
    others."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._patience_s: float = self.config.app.state.engine.settings.stall_s  # type: ignore[union-attr]
        self._seen: tuple[Any, int] | None = None
        self._look()
        self.app = self._offering(self.app)

    def _offering(self, app: ASGIApp) -> ASGIApp:
        """The application, with `WRITE` where the body of an answer goes in chunks, as that of
        unknown length does unless the client is of HTTP/1.0."""

        async def offering(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
                scope["extensions"] = {WRITE: partial(self._write, self.cycle)}
            try:
                await app(scope, receive, send)
            finally:
                scope.pop("extensions", None)  # which has the cycle, which has the scope

        return offering

    def _write(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Does what `cycle.send` does with a part of a body, where that does not wait. An answer
        has hundreds of small parts, and most of what they cost would be calls of Python."""
        if cycle.disconnected or cycle.response_complete or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Drops a client that since the last look has neither sent the whole head of a request
        nor taken any of what is left of an answer. Requests under way have limits of their own,
        and so have connections that are kept alive."""
        is_under_way = self.cycle is not None and not self.cycle.response_complete
        is_kept_alive = self.timeout_keep_alive_task is not None
        if (is_under_way or is_kept_alive) and not self.transport.is_closing():
            seen = None
        else:
            seen = (self.cycle, self.transport.get_write_buffer_size())
            if seen == self._seen:
                self.transport.abort()
                return
        self._seen = seen
        self._looking = self.loop.call_later(self._patience_s, self._look)

    def send_400_response(self, msg: str) -> None:
        """A head that is no HTTP, or is larger than `MAX_HEADER_BYTES`."""
        response = ApiError(400, msg.rstrip(".").lower(), code="invalid_http").response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Drained(uvicorn.Server):
    """On SIGTERM or SIGINT no more requests are admitted, and those under way may finish. As long
    as there are any, those who come are answered: that the server is shutting down."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None]) -> None:
        super().__init__(config_of(app))
        self._engine: EngineLoop = app.state.engine
        self._on_ready = on_ready
        self.was_interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain()
        while self._engine.is_finishing and not self.force_exit:
            await asyncio.sleep(TICK_S)
            await self.on_tick(0)  # which keeps the Date header right
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # which uvicorn takes for a reason to leave the engine running
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.was_interrupted |= sig == signal.SIGINT
        self._engine.drain()
        super().handle_exit(sig, frame)


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 is any free one. Who connects before the server
    runs is answered once it does. Raises `InvalidInput`."""
    if not 0 <= port < 1 << 16:  # getaddrinfo would cut it
        raise InvalidInput(f"--port {port} is not from 0 to 65535; give another --port")
    opened = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, proto)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        if opened is not None:
            opened.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidInput(
            f"cannot listen at {host!a} port {port} ({reason}); give another --host or --port"
        ) from None
    return opened


def url_of(opened: socket.socket) -> str:
    """The address of a socket, as a browser takes it."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def config_of(app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves an application of `create_app`."""
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LINGER_S,
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether it is more than a request that was cut off because the server ends at once."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def run(app: FastAPI, opened: socket.socket, on_ready: Callable[[], None]) -> bool:
    """Serves until SIGTERM or SIGINT; `on_ready` is called once requests are answered.

    Whether it was SIGINT that ended it. A second one ends it at once.
    """
    server = Drained(app, on_ready)
    logger = logging.getLogger("uvicorn.error")
    logger.addFilter(_is_news)
    before = {sig: signal.signal(sig, server.handle_exit) for sig in HANDLED_SIGNALS}
    gc.collect()
    gc.freeze()  # what is loaded stays: to look through it takes 0.3 s, while everybody waits
    try:
        server.run(sockets=[opened])  # raises what it caught again, at the end
    finally:
        gc.unfreeze()
        logger.removeFilter(_is_news)
        for sig, handler in before.items():
            signal.signal(sig, handler)
        opened.close()
    return server.was_interrupted
