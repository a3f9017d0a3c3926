"""A server in this process on a free loopback port, what asks it, and answers that are scripted."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn
from fastapi import FastAPI

from stretto import LM
from stretto.runtime.request import Script
from stretto.server import Settings, create_app
from stretto.server.engine import EngineLoop
from stretto.server.run import Drained, open_socket
from stretto.server.voice import Voice

PROMISE = object()
SYNC = object()
CHAT = "/v1/chat/completions"
TAGS = ("<promise", "<async", "</async", "<sync", "stretto:")


@dataclass
class Served:
    """A server that runs."""

    lm: LM
    app: FastAPI
    server: uvicorn.Server
    port: int

    @property
    def engine(self) -> EngineLoop:
        return self.app.state.engine  # type: ignore[no-any-return]

    @contextmanager
    def client(self, key: str = "none", **options: Any) -> Iterator[openai.OpenAI]:
        url = f"http://127.0.0.1:{self.port}/v1"
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0, **options) as client:
            yield client

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> tuple[int, dict[str, str], Any]:  # fmt: skip
        """Status, headers and JSON (or text) of one exchange. A body that is not bytes is sent as
        JSON."""
        connection = self.connect()
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sending = {"Content-Type": "application/json", **(headers or {})}
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, sent, sending)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        own = {name.lower(): value for name, value in response.headers.items()}
        return response.status, own, json.loads(data) if is_json else data

    def chat(self, content: str = "hi", **fields: Any) -> dict[str, Any]:
        """The body of a chat request."""
        messages = [{"role": "user", "content": content}]
        return {"model": self.lm.name, "messages": messages, "max_tokens": 20, **fields}

    def check_idle(self) -> None:
        """Nothing is under way, and no slot is taken."""
        wait_until(lambda: self.engine.num_admitted == 0)
        scheduler = self.lm.scheduler
        wait_until(lambda: not (scheduler.running or scheduler.waiting))
        scheduler.check_integrity()
        assert scheduler.pool.num_free_pages == scheduler.pool.num_pages


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


@contextmanager
def serving(lm: LM, **settings: Any) -> Iterator[Served]:
    app = create_app(lm, Settings(**settings))
    opened = open_socket("127.0.0.1", 0)
    server = Drained(app, lambda: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Served(lm, app, server, opened.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(60)
        opened.close()
        assert not thread.is_alive()


def play(lm: LM, threads: Mapping[str, Sequence[Any]]) -> Script:
    """Each thread says its texts, promises and syncs, and ends."""
    control = lm.vocabulary.control
    promise = [control["promise"], 60, control["tokens"], *lm.vocabulary.encode("9")]
    promise.append(control["promise_end"])
    scripts: dict[str, list[int]] = {}
    for name, parts in threads.items():
        ids: list[int] = []
        for part in parts:
            if part is PROMISE:
                ids += promise
            else:
                ids += [control["sync"]] if part is SYNC else lm.vocabulary.encode(part)
        ids.append(control["async_end"] if "." in name else min(lm.vocabulary.end_ids))
        scripts[name] = ids
    return lambda thread, index: scripts[thread][index]


@contextmanager
def scripted(lm: LM, script: Script) -> Iterator[None]:
    """All that is asked meanwhile is answered by a script."""
    prepare = lm.prepare

    def forced(*args: Any, **options: Any) -> Any:
        return prepare(*args, script=script, **options)

    lm.prepare = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        del lm.prepare


def endless(thread: str, index: int) -> int:
    """A script that draws the same token until there are enough."""
    return 40


@contextmanager
def slowed(lm: LM, pass_s: float, *, least_runs: int = 0) -> Iterator[list[int]]:
    """Passes of so many runs take at least so long; the list grows by each pass's number of
    runs."""
    passes: list[int] = []

    def before(runs: Any) -> None:
        passes.append(len(runs))
        if len(runs) >= least_runs:
            time.sleep(pass_s)

    with before_passes(lm, before):
        yield passes


@contextmanager
def read_along(lm: LM) -> Iterator[None]:
    """No pass begins before the readers of streams have taken what the last one settled."""
    has_read = threading.Event()
    fresh = Voice.fresh

    def noted(voice: Voice) -> Any:
        chunks = fresh(voice)
        has_read.set()
        return chunks

    def before(_: Any) -> None:
        has_read.wait(1)  # or nothing is new
        has_read.clear()

    Voice.fresh = noted  # type: ignore[method-assign]
    try:
        with before_passes(lm, before):
            yield
    finally:
        Voice.fresh = fresh  # type: ignore[method-assign]


@contextmanager
def before_passes(lm: LM, act: Callable[[Any], None]) -> Iterator[None]:
    """`act` is called with the runs of each pass before it."""
    engine = lm.scheduler.engine

    class Acting:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def forward(self, runs: Any) -> Any:
            act(runs)
            return engine.forward(runs)

    lm.scheduler.engine = Acting()  # type: ignore[assignment]
    try:
        yield
    finally:
        lm.scheduler.engine = engine
