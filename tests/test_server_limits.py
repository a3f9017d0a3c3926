"""What a client may cost: slow bodies, connections that never end; an engine that dies."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import CHAT, PROMISE, SYNC, Served, play, serving, slowed, wait_until
from tiny_lms import tiny_lm

from stretto import SamplingParams
from stretto.errors import InvalidInput
from stretto.runtime.request import Request
from stretto.server import Settings
from stretto.server import run as running
from stretto.server.errors import MAX_ECHO, of_validation
from stretto.server.gate import KNOWN


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_lm("pasta", prefix_cache=True)) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "field", "items"),
    [
        (CHAT, "messages", ("1,", "[{}]")),
        (CHAT, "messages", ("1,", '[{{"role": "user", "content": [{}]}}]')),
        (CHAT, "stop", ("1,", "[{}]")),
        (CHAT, "stretto", ('"x",', '{{"stop_ids": [{}]}}')),
        ("/v1/completions", "prompt", ("1,", "[{}]")),
        (CHAT, "messages", ('{"role": "user", "content": ""},', "[{}]")),
    ],
)
def test_one_bad_item_stands_for_all(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, field: str, items: tuple[str, str]
) -> None:
    """Each error is an object of its own: a body of 4 MB made two million of them."""
    counts: list[int] = []

    def counting(errors: Any) -> Any:
        counts.append(len(errors))
        return of_validation(errors)

    monkeypatch.setattr("stretto.server.errors.of_validation", counting)
    item, whole = items
    many = json.loads(whole.format((item * 5000)[:-1]))
    status, _, body = served.ask(path, {"model": "m", "prompt": "x", field: many})
    assert status == 400
    assert body["error"]["param"].startswith((field, "prompt"))
    assert max(counts) <= 6


BODIES = {
    "text": (b'"' + b"a, b [c] {d} " * 300_000 + b'"', False),
    "escapes": (b'"' + b'\\"' * 1_000_000 + b'"', False),
    "an open string": (b'"' + b",\\\n" * 500_000, False),
    "messages": (b'{"role":"user","content":[{"type":"text","text":"x"}]},' * 4096, False),
    "lists": (b"[]," * 60_000, True),
    "parts": (b'{"type":"text","text":""},' * 20_000, True),
    "strings": (b'"" ' * 110_000, True),
    "fields": (b'"k":1,' * 60_000, True),
    "depth": (b"[" * 110_000, True),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_too_many_items_are_refused_before_they_are_parsed(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Parsing is on the event loop: what it costs is bounded by the items, texts aside."""
    items, is_refused = BODIES[name]
    body = b'{"model": "m", "messages": [' + items + b"]}"
    assert len(body) < Settings().max_body_bytes
    parsed: list[int] = []

    def loads(data: bytes, *args: Any, **options: Any) -> Any:
        parsed.append(len(data))
        return json.JSONDecoder().decode(data.decode())

    monkeypatch.setattr("starlette.requests.json.loads", loads)
    status, _, answer = served.ask(CHAT, body)
    monkeypatch.undo()
    assert answer["error"]["code"] != "queue_full"
    assert (status == 413) is is_refused, answer
    assert (len(body) in parsed) is not is_refused


def test_many_fields_are_one_error(served: Served) -> None:
    for body in (
        served.chat() | {f"k{i}": 1 for i in range(5000)},
        served.chat(stretto={f"k{i}": 1 for i in range(5000)}),
    ):
        status, _, answer = served.ask(CHAT, body)
        assert status == 400
        assert "fields are more than there are" in answer["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"q" * 100_000: 1},
        {"model": "q" * 100_000},
        {"stretto": {"method": "q" * 900}},
        {"\ud800": 1},
    ],
)
def test_what_was_sent_is_not_sent_back_in_full(served: Served, change: dict[str, Any]) -> None:
    status, headers, body = served.ask(CHAT, served.chat() | change)
    assert status in (400, 404)
    assert len(body["error"]["message"]) <= MAX_ECHO
    assert int(headers["content-length"]) < 4 * MAX_ECHO
    assert not body["error"]["message"].startswith(":")


def test_paths_that_count_are_few() -> None:
    assert KNOWN.match("/health")
    assert not KNOWN.match("/health\n")
    assert not KNOWN.match("/v1/models/x")


def until_dropped(served: Served, send: bytes, again: bytes = b"") -> float:
    """Seconds until the server ends a connection on which this was sent."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", served.port), timeout=0.05) as raw:
        raw.sendall(send)
        while time.monotonic() < begun + 20:
            try:
                raw.sendall(again)
                if not raw.recv(1 << 16):
                    return time.monotonic() - begun
            except TimeoutError:
                pass
            except OSError:
                return time.monotonic() - begun
    raise AssertionError("it was never dropped")


def test_connections_that_say_nothing_are_dropped() -> None:
    with serving(tiny_lm(prefix_cache=True), stall_s=0.3) as served:
        for send, again in ((b"", b""), (b"GET / HTTP/1.1\r\nHost", b""), (b"GET /", b"x")):
            assert until_dropped(served, send, again) >= 0.25
        kept = served.connect()  # one that waits for its next request is not dropped so soon
        for _ in range(2):
            kept.request("GET", "/health")
            assert kept.getresponse().read() == b'{"status":"ok"}'
            time.sleep(0.8)
        kept.close()
        wait_until(lambda: not served.server.server_state.connections)


def test_answers_that_nobody_takes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "KEEP_ALIVE_S", 0.3)
    with serving(tiny_lm(prefix_cache=True), stall_s=0.3) as served:
        for sock in served.server.servers[0].sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.connect(("127.0.0.1", served.port))
            raw.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            connections = served.server.server_state.connections
            wait_until(lambda: any(c.cycle and c.cycle.response_complete for c in connections))
            assert any(c.transport.get_write_buffer_size() for c in connections)
            wait_until(lambda: not connections, 20)


def test_the_model_may_be_used_beside_its_server(served: Served) -> None:
    """Another thread steps what the server's readers look at."""
    lm, told = served.lm, []
    story: dict[str, Any] = {"main": ["a", PROMISE, "b", PROMISE, "c", SYNC, "end"]}
    story |= {f"main.{k}": ["words " * 8] for k in (1, 2)}
    is_over = threading.Event()

    def beside() -> None:
        while not is_over.is_set():
            params = SamplingParams(max_tokens=300)
            told.append(lm.generate("x", params, script=play(lm, story))[0].text)

    with ThreadPoolExecutor(1) as other:
        using = other.submit(beside)
        fields: Any = {"max_tokens": 60, "seed": 2, "stream_options": {"threads": True}}
        answers = {
            served.ask(CHAT, served.chat(stream=True, **fields))[2][-2000:] for _ in range(3)
        }
        is_over.set()
        using.result()
    assert all(b"[DONE]" in answer and b'"error"' not in answer for answer in answers)
    assert set(told) == {told[0]}
    served.check_idle()


def test_what_a_reader_sees_is_never_half_of_a_step(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pass of another user of the model runs, nothing is published."""
    is_midway, seen = threading.Event(), []
    take_step = Request._take_step

    def slow(request: Request) -> None:
        is_midway.set()
        take_step(request)
        time.sleep(0.002)
        is_midway.clear()

    monkeypatch.setattr(Request, "_take_step", slow)
    lock = served.lm.between_passes

    class Looking:
        def __enter__(self) -> None:
            lock.__enter__()
            seen.append(is_midway.is_set())

        def __exit__(self, *_: object) -> None:
            lock.__exit__(None, None, None)

    monkeypatch.setattr(type(served.lm), "between_passes", property(lambda _: Looking()))
    with ThreadPoolExecutor(1) as other:
        using = other.submit(served.lm.generate, "y", SamplingParams(max_tokens=40))
        assert served.ask(CHAT, served.chat(stream=True, max_tokens=30))[0] == 200
        using.result()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    lm = tiny_lm(prefix_cache=True)
    with serving(lm) as served, slowed(lm, 0.02) as passes, ThreadPoolExecutor(1) as other:
        body = served.chat(max_tokens=300, temperature=1, seed=1, stream=stream)
        waiting = other.submit(served.ask, CHAT, body)
        wait_until(lambda: len(passes) > 3)
        ticket = served.engine.admit(1)

        def broken(_: Any) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(served.engine, "_publish", broken)
        told = str(waiting.result(30)[2])
        assert "the engine has stopped" in told
        assert served.ask("/health")[0] == 500
        status, _, body = served.ask("/ready")
        assert (status, body["error"]["code"]) == (500, "stopped")
        assert served.ask(CHAT, served.chat())[0] == 500
        with pytest.raises(Exception, match="started anew"):
            served.engine.submit([])  # admitted before it died
        ticket.release()
        served.check_idle()


def test_bad_addresses_and_names_are_told_in_one_line() -> None:
    for host in ("a..b", "x" * 300, "no.such.host.invalid"):
        with pytest.raises(InvalidInput, match="give another --host"):
            running.open_socket(host, 0)
    for port in (-1, 70_000):
        with pytest.raises(InvalidInput, match=f"--port {port} is not"):
            running.open_socket("127.0.0.1", port)
    first = running.open_socket("127.0.0.1", 0)  # taken though nothing is served yet
    with first, pytest.raises(InvalidInput, match="in use"):
        running.open_socket("127.0.0.1", first.getsockname()[1])
    for origin in ("https://mine.example/", "mine.example", "https://mine.example/page"):
        with pytest.raises(InvalidInput, match="no origin"):
            Settings(cors_origins=(origin,))
    Settings(cors_origins=("*", "http://localhost:3000", "http://[::1]:3000"))
    for name in ("", "a\nb"):
        with pytest.raises(InvalidInput, match="printable"):
            Settings(name=name)
