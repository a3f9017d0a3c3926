"""A process that serves and is told to end, by signals, while clients wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import CHAT, Served, wait_until
from tiny_lms import tiny_lm

TESTS = Path(__file__).parent
GATED = """
import sys, time
from pathlib import Path

from serving import before_passes
from tiny_lms import tiny_lm

import stretto.cli.answer
from stretto.cli import main

def wait(runs):
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)

lm = tiny_lm(prefix_cache=True)
stretto.cli.answer.load = lambda *_, **__: lm
with before_passes(lm, wait):
    sys.exit(main(["serve", "--port", "0", "--json", "--drain-s", "600"]))
"""
"""The verb on a tiny model, whose passes wait until there is a file."""


@contextmanager
def process(*arguments: str) -> Iterator[tuple[Any, Served, str]]:
    """A process that serves, a client of it, and the name of its model."""
    environment = os.environ | {"PYTHONPATH": str(TESTS), "STRETTO_API_KEYS": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *arguments], env=environment, **pipes) as running:
        try:
            told = json.loads(running.stdout.readline())
            port = int(told["url"].rpartition(":")[2])
            yield running, Served(None, None, None, port), told["model"]  # type: ignore[arg-type]
            assert b"Traceback" not in running.stderr.read()
        finally:
            running.kill()


def test_who_comes_while_it_ends_is_told_so(tmp_path: Path) -> None:
    """It listens as long as a client waits for an answer, which comes whole."""
    gate = tmp_path / "go"
    with process("-c", GATED, str(gate)) as (running, served, model):
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        body |= {"temperature": 0, "max_tokens": 9}
        connection = served.connect(120)
        sent = json.dumps(body | {"stream": True})
        connection.request("POST", CHAT, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        assert served.ask("/ready")[0] == 200
        os.kill(running.pid, signal.SIGTERM)
        wait_until(lambda: served.ask("/ready")[0] == 503)
        for path, asked in (("/ready", None), (CHAT, body)):
            status, headers, answer = served.ask(path, asked)
            assert (status, answer["error"]["code"]) == (503, "shutting_down")
            assert int(headers["retry-after"]) >= 1
        assert served.ask("/health")[0] == 200
        gate.touch()
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert running.wait(120) == 0
        with pytest.raises(ConnectionError):
            served.ask("/ready")


@pytest.mark.parametrize("second", [False, True])
def test_a_process_that_is_told_to_end(tmp_path: Path, second: bool) -> None:
    """SIGTERM while a client reads a stream: it gets all of it. Ctrl-C after it: at once."""
    tiny_lm().save(tmp_path / "tiny")
    command = ["-m", "stretto", "serve", "--port", "0", "--json", "--drain-s", "600", "--offline"]
    command += ["--model", str(tmp_path / "tiny"), "--pool-slots", "40000"]
    with process(*command) as (running, served, model):
        body = {"model": model, "prompt": "x", "stream": True, "seed": 1, "max_tokens": 450}
        connection = served.connect()
        data = json.dumps(body | {"n": 64 if second else 4})
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        os.kill(running.pid, signal.SIGTERM)
        if second:
            time.sleep(0.3)
            os.kill(running.pid, signal.SIGINT)
            assert running.wait(120) == 130
        else:
            assert response.read().endswith(b"data: [DONE]\n\n")
            assert running.wait(120) == 0
        connection.close()
