"""What stands before the application: hosts, keys, the size of bodies, and the count of answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.server.errors import ApiError
from stretto.server.metrics import Metrics
from stretto.server.settings import Settings

CLOSED = re.compile(r"/(v1|metrics)(/|$)")
"""Paths that need a key. The others tell only whether the server lives, its schema and page."""
KNOWN = re.compile(r"/(v1/(chat/completions|completions|models)|health|ready|metrics)?\Z")
OWNER = "stretto.owner"
"""What a scope says of whose request it is: a digest of its key. Absent where none is needed."""
MAX_DISCARDED_BYTES = 64 << 20
"""A body that is refused is still read up to here, so that the client hears why."""
MAX_ITEMS = 100_000
"""Strings, commas and opening brackets of a body. What is made of them is made on the event loop,
where everybody waits: 4 MB of text take 5 ms there, and 4 MB of `[],[],` would take 400."""
Headers = dict[bytes, bytes]
_ITEM = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,\[{]', re.DOTALL)


class Gate:
    """An ASGI middleware. Refuses by the request's head before it reads the body, and hands on
    whole bodies only."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._digests = [_digest(key.encode()) for key in settings.keys]
        self._hosts = {host.lower() for host in settings.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._counting(scope, send)
        reader = Reader(receive)
        headers = dict(scope["headers"])
        try:
            self._check_head(scope, headers)
            body = await self._body(scope, headers, reader)
        except ApiError as error:
            await self._discard(reader)
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_head(self, scope: Scope, headers: Headers) -> None:
        """Notes whose request it is. Raises `ApiError` for a host or a key that is not accepted."""
        if self._hosts:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
            if name not in self._hosts:
                raise ApiError(421, f"host {name!a} is not served here", code="unknown_host")
        if self._digests and scope["method"] != "OPTIONS" and CLOSED.match(_path(scope)):
            scope[OWNER] = self._check_key(headers.get(b"authorization", b""))

    def _check_key(self, given: bytes) -> str:
        """Whose key it is. Raises `ApiError` if it is nobody's."""
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(found):
            what = "the API key is wrong" if given else "no API key was given"
            raise ApiError(
                401,
                f"{what}; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest.hex()

    async def _body(self, scope: Scope, headers: Headers, reader: Reader) -> bytes | None:
        """The whole body; None if the client left first. Raises `ApiError` for one that is too
        large or too slow."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        limit = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while not reader.is_over:
                    parts.append(await reader.read())
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body took longer than {self._settings.body_timeout_s:g} s; send it anew",
                code="too_slow",
            ) from None
        body = b"".join(parts)
        if has_too_many_items(body):
            raise ApiError(
                413,
                f"the body has more than {MAX_ITEMS:,} JSON values and separators; ask for less",
                code="too_large",
            )
        return None if reader.has_left else body

    async def _discard(self, reader: Reader) -> None:
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.body_timeout_s):
                while not reader.is_over and size < MAX_DISCARDED_BYTES:
                    size += len(await reader.read())

    def _counting(self, scope: Scope, send: Send) -> Send:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = _path(scope) if KNOWN.match(_path(scope)) else "other"
                method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
                self._metrics.http.labels(method, path, str(message["status"])).inc()
            await send(message)

        return counting


class Reader:
    """The body of a request, part by part. `is_over` at its end, or once the client `has_left`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_over = False
        self.has_left = False

    async def read(self) -> bytes:
        message = await self._receive()
        self.has_left = message["type"] == "http.disconnect"
        self.is_over = self.has_left or not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body


def _path(scope: Scope) -> str:
    """The path within the application, wherever that is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _digest(key: bytes) -> bytes:
    """Keys are compared by digests, which have one length."""
    return hashlib.sha256(key).digest()


def has_too_many_items(body: bytes) -> bool:
    """Whether a body, JSON or not, has more than `MAX_ITEMS` outside of its strings, themselves
    included. Looks no further than that."""
    if sum(map(body.count, (b'"', b",", b"[", b"{"))) <= MAX_ITEMS:
        return False
    return any(number > MAX_ITEMS for number, _ in enumerate(_ITEM.finditer(body), start=1))


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit:,} bytes; shorten it", code="too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first, whole, and then what comes after it."""
    whole: Message = {"type": "http.request", "body": body, "more_body": False}
    messages = iter([whole])

    async def replay() -> Message:
        message = next(messages, None)
        return await receive() if message is None else message

    return replay
