"""Streams: the two ways in which what a pass has brought is written, and how streams end."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from serving import CHAT, PROMISE, SYNC, Served, play, read_along, scripted, serving, slowed
from tiny_lms import tiny_lm

from stretto.server import create_app, streams
from stretto.server import run as running
from stretto.server.engine import _tell_all
from stretto.server.job import Tell
from stretto.server.voice import Voice

STORY: dict[str, Any] = {
    "main": ["first", PROMISE, "then", PROMISE, "at last", SYNC, "the end"],
    "main.1": ["words " * 4],
    "main.2": ["more " * 3],
}
ALL: dict[str, Any] = {
    "stream": True, "max_tokens": 300, "logprobs": True,
    "stream_options": {"include_usage": True, "threads": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_lm("pasta")) as made:
        yield made


def chunks(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n\ndata: [DONE]\n\n")
    lines = data.split(b"\n\n")[:-2]
    assert all(line.startswith(b"data: {") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def told(found: list[dict[str, Any]]) -> tuple[Any, ...]:
    """What all chunks come to, wherever one ends and the next begins."""
    choices = [choice for chunk in found for choice in chunk["choices"]]
    logprobs = [c["logprobs"]["content"] for c in choices if c["logprobs"]]
    events = [e for chunk in found for e in chunk.get("stretto", {}).get("events", [])]
    kept = [{k: v for k, v in e.items() if k != "time_s"} for e in events]
    return (
        "".join(choice["delta"].get("content") or "" for choice in choices),
        [token for several in logprobs for token in several],
        [event for event in kept if event["type"] != "usage"],
        choices[-1]["finish_reason"],
        found[-1]["usage"]["completion_tokens"],
    )


def without_offer(app: Any, body: dict[str, Any]) -> bytes:
    """The answer of an application that runs under a server with nothing but ASGI."""
    sent: list[Any] = []

    async def ask() -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.sleep(3600)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(),
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "root_path": "", "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"},
            "server": ("test", 80), "client": ("test", 1), "state": {},
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(ask())
    assert sent[0]["status"] == 200
    assert not sent[-1]["more_body"]
    return b"".join(message["body"] for message in sent[1:])


def test_what_is_written_at_once_and_what_waits_come_to_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, written = served.lm, []
    write = running.Protocol._write

    def noting(protocol: Any, cycle: Any, data: bytes) -> bool:
        written.append(data)
        return write(protocol, cycle, data)

    monkeypatch.setattr(running.Protocol, "_write", noting)
    with scripted(lm, play(lm, STORY)), read_along(lm):
        at_once = chunks(served.ask(CHAT, served.chat(**ALL))[2])
        num_written = len(written)
        monkeypatch.setattr(running.Protocol, "_write", lambda *_: False)
        waited = chunks(served.ask(CHAT, served.chat(**ALL))[2])
    assert num_written > 10
    assert told(at_once) == told(waited)
    assert told(at_once)[0].startswith("first" + "words " * 4 + "then")
    app = create_app(lm)
    with scripted(lm, play(lm, STORY)):
        assert told(chunks(without_offer(app, served.chat(**ALL)))) == told(at_once)
    app.state.engine.close()
    served.check_idle()


def test_a_client_of_http_1_0_gets_no_chunks(served: Served) -> None:
    data = json.dumps(served.chat(stream=True, temperature=0)).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as raw:
        raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    assert chunks(answer.partition(b"\r\n\r\n")[2])[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stream_with_nothing_to_say_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.1)
    with slowed(served.lm, 0.5):
        answer = served.ask(CHAT, served.chat(stream=True, max_tokens=2))[2]
    assert b"\n\n: waiting\n\n" in answer
    assert answer.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_ends_as_it_would_say_so_ends_whole(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_news = streams.EventStream._has_news

    async def too_late(stream: streams.EventStream) -> bool:
        await has_news(stream)
        return False

    monkeypatch.setattr(streams.EventStream, "_has_news", too_late)
    answer = served.ask(CHAT, served.chat(stream=True, max_tokens=5, temperature=0))[2]
    assert b"\n\n: waiting\n\n" in answer
    assert b'"finish_reason":"length"' in answer
    assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_bug_ends_the_stream_and_gives_everything_back(
    served: Served, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    fresh, calls = Voice.fresh, []

    def failing(voice: Voice) -> bytes:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("a bug")
        return fresh(voice)

    monkeypatch.setattr(Voice, "fresh", failing)
    if not at_once:
        monkeypatch.setattr(running.Protocol, "_write", lambda *_: False)
    with slowed(served.lm, 0.005), pytest.raises(http.client.IncompleteRead):
        served.ask(CHAT, served.chat(stream=True, max_tokens=200, temperature=1, seed=1))
    monkeypatch.undo()
    served.check_idle()


def test_what_was_loaded_is_not_collected_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(
        running.Drained, "run", lambda *_, **__: frozen.append(gc.get_freeze_count())
    )
    before = threading.active_count()
    assert not running.run(create_app(tiny_lm()), running.open_socket("127.0.0.1", 0), lambda: None)
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0
    assert threading.active_count() == before


def test_all_streams_of_a_pass_are_told_before_any_of_them_writes() -> None:
    done: list[str] = []

    def reader(name: str, *, writes: bool) -> Tell:
        def tell() -> Callable[[], None] | None:
            done.append(f"told {name}")
            return partial(done.append, f"written {name}") if writes else None

        return tell

    _tell_all([reader("a", writes=True), reader("b", writes=False), reader("c", writes=True)])
    assert done == ["told a", "told b", "told c", "written a", "written c"]
