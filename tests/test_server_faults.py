"""Clients that vanish, stall or come in crowds, passes that fail, and a server that must end."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from serving import CHAT, Served, before_passes, endless, scripted, serving, slowed, wait_until
from tiny_lms import tiny_lm

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.runtime.request import Request
from stretto.server import Settings, create_app
from stretto.server import run as running
from stretto.server.job import Job

MANY: Any = {"max_tokens": 300, "temperature": 1, "seed": 1, "stretto": {"method": "sequential"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_lm("pasta", prefix_cache=True)) as made:
        yield made


def send(served: Served, body: dict[str, Any], *, buffer: int | None = None) -> socket.socket:
    """A request on a socket of its own, whose answer is left to the caller."""
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.settimeout(60)
    made.connect(("127.0.0.1", served.port))
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    made.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return made


def alone(lm: LM, prompt: str, **params: Any) -> str:
    return lm.generate(prompt, SamplingParams(**params), method="sequential")[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_who_vanishes_is_cancelled_within_two_steps(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It is noticed while a pass runs, and the request ends before another one."""
    has_left, num_late, cancelled = threading.Event(), [], threading.Event()
    cancel = Job.cancel

    def cancelling(job: Job) -> None:
        cancel(job)
        cancelled.set()

    def before(_: Any) -> None:
        time.sleep(0.01)
        if has_left.is_set():
            num_late.append(1)
            assert cancelled.wait(60), "nobody noticed that the client has left"

    monkeypatch.setattr(Job, "cancel", cancelling)
    with before_passes(served.lm, before):
        client = send(served, served.chat(stream=stream, **MANY))
        wait_until(lambda: bool(served.lm.scheduler.running))
        client.close()
        has_left.set()
        wait_until(lambda: not served.lm.scheduler.running)
    assert cancelled.is_set()
    assert len(num_late) <= 1
    served.check_idle()


def test_a_crowd_that_stays_is_told_what_each_would_be_alone(served: Served) -> None:
    lengths = [3, 17, 40, 8, 25, 60]
    told = [alone(served.lm, f"p {n}", max_tokens=n, temperature=1, seed=n) for n in lengths]

    def ask(length: int) -> str:
        fields = MANY | {"max_tokens": length, "seed": length}
        _, _, answer = served.ask(CHAT, served.chat(f"p {length}", **fields))
        return str(answer["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(len(lengths)) as crowd:
        assert list(crowd.map(ask, lengths)) == told
    served.check_idle()


def test_a_reader_that_takes_nothing_blocks_nobody_and_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lm = tiny_lm("pasta", pool_slots=2048, prefix_cache=True)
    with serving(lm, stall_s=0.5) as served:
        for sock in served.server.servers[0].sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        fields = MANY | {"max_tokens": 450, "stream_options": {"threads": True}}
        with send(served, served.chat(stream=True, **fields), buffer=2048):
            wait_until(lambda: bool(lm.scheduler.running))
            assert served.ask(CHAT, served.chat())[0] == 200
            wait_until(lambda: not lm.scheduler.running)  # it was decoded, or cancelled
            served.check_idle()
    assert "a reader took nothing for 0.5 s" in caplog.text


def test_a_full_pool_makes_requests_wait_and_changes_no_answer() -> None:
    lm = tiny_lm(pool_slots=96, prefix_cache=True)
    told = [alone(lm, f"number {n}", max_tokens=40, temperature=1, seed=n) for n in range(5)]
    with serving(lm) as served, ThreadPoolExecutor(5) as crowd:
        before = lm.scheduler.num_preemptions

        def ask(n: int) -> str:
            body = served.chat(f"number {n}", **(MANY | {"max_tokens": 40, "seed": n}))
            return str(served.ask(CHAT, body)[2]["choices"][0]["message"]["content"])

        with slowed(lm, 0.01):
            with lm.between_passes:  # so that all of them are under way at once
                asked = [crowd.submit(ask, n) for n in range(5)]
                wait_until(lambda: served.engine.num_admitted == 5)
            assert [each.result() for each in asked] == told
        assert lm.scheduler.num_preemptions > before
        served.check_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["engine", "session"])
def test_what_fails_in_one_request_harms_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool, where: str
) -> None:
    lm, engine = served.lm, served.lm.scheduler.engine
    told = alone(lm, "sound", max_tokens=40, temperature=1, seed=1)
    prepare, doomed = lm.prepare, []

    def marking(prompt: Any, *args: Any, **options: Any) -> Any:
        made = prepare(prompt, *args, **options)
        if "doomed" in str(prompt):
            doomed.append(made.request)
        return made

    def is_doomed() -> bool:
        return bool(doomed) and doomed[0].step >= 5

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def forward(self, runs: Any) -> Any:
            time.sleep(0.01)
            if is_doomed() and any(run.view.memory is doomed[0].memory for run in runs):
                raise RuntimeError("no such kernel")
            return engine.forward(runs)

    monkeypatch.setattr(lm, "prepare", marking)
    if where == "engine":
        monkeypatch.setattr(lm.scheduler, "engine", Failing())
    else:
        take_step = Request._take_step

        def failing(request: Request) -> None:
            if is_doomed() and request is doomed[0]:
                raise RuntimeError("no such kernel")
            take_step(request)

        monkeypatch.setattr(Request, "_take_step", failing)
    with ThreadPoolExecutor(1) as other, served.client() as client:
        sound = other.submit(served.ask, CHAT, served.chat("sound", **(MANY | {"max_tokens": 40})))
        settings = served.chat("doomed", stream=stream, max_tokens=200, temperature=0)
        with pytest.raises(openai.APIError, match="no such kernel"):
            list(client.chat.completions.create(**settings))
        assert sound.result()[2]["choices"][0]["message"]["content"] == told
    assert doomed[0].finish_reason == "error"
    monkeypatch.undo()
    served.check_idle()


def test_too_many_at_once_are_told_when_to_come_back() -> None:
    with (
        serving(tiny_lm(prefix_cache=True), max_requests=2) as served,
        slowed(served.lm, 0.05) as passes,
    ):
        status, _, body = served.ask(CHAT, served.chat(n=3))
        assert (status, body["error"]["param"]) == (400, "n")
        with send(served, served.chat(n=2, **MANY)):
            wait_until(lambda: len(passes) > 1)
            status, headers, body = served.ask(CHAT, served.chat())
            assert (status, body["error"]["code"]) == (429, "queue_full")
            assert int(headers["retry-after"]) >= 1
        wait_until(lambda: served.engine.num_admitted == 0)
        assert served.ask(CHAT, served.chat(max_tokens=2))[0] == 200
        assert b"stretto_refused_total 1.0" in served.ask("/metrics")[2]


def test_a_request_past_its_deadline_is_cancelled() -> None:
    lm = tiny_lm(prefix_cache=True)
    with serving(lm, deadline_s=0.3) as served, slowed(lm, 0.05), scripted(lm, endless):
        status, headers, body = served.ask(CHAT, served.chat(**MANY))
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert headers["x-should-retry"] == "false"
        with served.client() as client, pytest.raises(openai.APIError, match=r"0\.3 s"):
            list(client.completions.create(model=served.lm.name, prompt="x", stream=True))
        served.check_idle()


def test_large_and_slow_requests_get_an_answer_too(served: Served) -> None:
    big = b'{"x": "' + b"x" * (10 << 20) + b'"}'
    status, _, body = served.ask(CHAT, big)
    assert (status, body["error"]["code"]) == (413, "too_large")
    with connected(served) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 40_000)
        assert b'"type":"invalid_request_error"' in read_all(raw)
    with serving(tiny_lm(prefix_cache=True), body_timeout_s=0.2) as other, connected(other) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
        answer = read_all(raw)
        assert b"408" in answer.splitlines()[0]
        assert b'"code":"too_slow"' in answer
        assert b"longer than 0.2 s" in answer
    with serving(tiny_lm(prefix_cache=True), max_body_bytes=1000, body_timeout_s=600) as other:
        for parts in (b"800\r\n" + b"x" * 0x800, b"2\r\nxx\r\n800\r\n" + b"x" * 0x800):
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            with connected(other) as raw:
                raw.sendall(head.encode() + parts + b"\r\n0\r\n\r\n")
                assert b"413" in read_all(raw).splitlines()[0]


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=30)


def read_all(raw: socket.socket) -> bytes:
    raw.settimeout(10)
    data = b""
    while b"}" not in data and (more := raw.recv(1 << 16)):
        data += more
    return data


def test_sigterm_lets_requests_finish_and_tells_those_who_come() -> None:
    lm = tiny_lm(prefix_cache=True)
    app, opened = create_app(lm, Settings(drain_s=60)), running.open_socket("127.0.0.1", 0)
    served = Served(lm, app, None, opened.getsockname()[1])  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    passes, all_told = [], threading.Event()

    def before(runs: Any) -> None:
        passes.append(runs)
        if served.engine.is_draining:
            all_told.wait(60)

    def clients() -> None:
        with before_passes(lm, before), ThreadPoolExecutor(1) as other:
            body = served.chat(**(MANY | {"max_tokens": 60}))
            under_way = other.submit(served.ask, CHAT, body)
            early = served.connect()
            early.request("GET", "/ready")
            found["before"] = early.getresponse().read()
            wait_until(lambda: len(passes) > 2)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: served.engine.is_draining)
            found["ready"] = served.ask("/ready")
            found["late"] = served.ask(CHAT, body)
            all_told.set()
            found["under_way"] = under_way.result()
            early.close()

    thread = threading.Thread(target=clients)
    assert running.run(app, opened, thread.start) is False
    thread.join(30)
    assert b"ready" in found["before"]
    for status, headers, body in (found["ready"], found["late"]):
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert int(headers["retry-after"]) >= 1
    status, _, body = found["under_way"]
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "length"
    with pytest.raises(ConnectionError):
        served.ask("/ready")
    assert not app.state.engine.is_alive
    lm.scheduler.check_integrity()


def test_what_does_not_finish_in_time_is_told_so() -> None:
    with (
        serving(tiny_lm(prefix_cache=True), drain_s=0.2) as served,
        slowed(served.lm, 0.05) as passes,
    ):
        with ThreadPoolExecutor(1) as other:
            under_way = other.submit(served.ask, CHAT, served.chat(**MANY))
            wait_until(lambda: len(passes) > 2)
            served.engine.drain()
            status, _, body = served.ask("/ready")
            assert (status, body["error"]["code"]) == (503, "shutting_down")
            assert served.ask("/health")[0] == 200
            status, headers, body = served.ask(CHAT, served.chat())
            assert (status, body["error"]["code"]) == (503, "shutting_down")
            assert "retry-after" in headers
            status, _, body = under_way.result()
            assert (status, body["error"]["code"]) == (503, "shutting_down")
        served.check_idle()


def test_the_verb_says_where_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def fake(app: Any, opened: Any, on_ready: Any) -> bool:
        seen["settings"] = app.state.engine.settings
        on_ready()
        opened.close()
        return True

    monkeypatch.setattr("stretto.cli.answer.load", lambda *_, **__: tiny_lm(prefix_cache=True))
    monkeypatch.setattr("stretto.server.run.run", fake)
    monkeypatch.setenv("STRETTO_API_KEYS", "")
    assert main(["serve", "--port", "0", "--json", "--name", "mine", "--max-requests", "3"]) == 130
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["model"] == "mine"
    assert told["url"].startswith("http://127.0.0.1:")
    assert told["url"] in err
    assert seen["settings"].max_requests == 3
    assert "127.0.0.1" in seen["settings"].hosts
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--allow-no-key" in capsys.readouterr().err
    assert main(["serve", "--deadline-s", "0"]) == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "give another --host or --port" in capsys.readouterr().err
