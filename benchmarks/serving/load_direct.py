"""The same requests without a server: one process, the Python API, as many under way at once.

As a script it is that process: it loads a model by `stretto serve`'s options, then answers a line
of JSON with one, as long as there are any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from load_client import Ask

if TYPE_CHECKING:
    from stretto import LM

STOP_S = 60
Cell = dict[str, Any]


class Direct:
    """The process under way."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def measure(self, asks: Sequence[Ask], num_clients: int, method: str) -> Cell:
        """What `decode` tells of these requests. Raises `SystemExit` if the process has died."""
        sent = {"asks": [asdict(ask) for ask in asks], "clients": num_clients, "method": method}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(sent).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the process without a server has died; its last lines tell why")
        cell: Cell = json.loads(line)
        return cell


@contextmanager
def direct(options: Sequence[str]) -> Iterator[Direct]:
    """A process of its own, with the model of these options of `stretto serve`; ended in the end.
    The model is loaded meanwhile: the first measurement waits for it."""
    command = [sys.executable, __file__, *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        try:
            yield Direct(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def decode(lm: LM, asks: Sequence[Ask], num_clients: int, method: str) -> Cell:
    """Decodes greedily, so many requests at once, the next one when one has ended: `seconds` from
    the first request to the last end, `passes`, `pass_s` and `forward_s` of all passes,
    `drawn_tokens`. Raises what a request fails with."""
    from stretto import SamplingParams

    waiting, running = deque(asks), []
    passes, pass_s, drawn, forward_s = 0, 0.0, 0, lm.scheduler.forward_s
    begun = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < num_clients:
            ask = waiting.popleft()
            params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0)
            running.append(lm.submit(ask.prompt, params, method=method))
        before = time.perf_counter()
        lm.step(running[0].request)
        pass_s += time.perf_counter() - before
        passes += 1
        for stream in [stream for stream in running if stream.request.is_done]:
            drawn += sum(thread.num_tokens for thread in stream.finish().threads)
            running.remove(stream)
    return {
        "seconds": time.perf_counter() - begun, "passes": passes, "pass_s": pass_s,
        "forward_s": lm.scheduler.forward_s - forward_s, "drawn_tokens": drawn,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Reads lines until there are no more. The server's own options are its to check."""
    from stretto.cli.answer import load
    from stretto.models.shipped import DEFAULT_MODEL

    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--pool-slots", type=int, required=True)
    parser.add_argument("--offline", action="store_true")
    found, _ = parser.parse_known_args(argv)
    lm = load(**vars(found))
    for line in sys.stdin:
        told = json.loads(line)
        asks = [Ask(**ask) for ask in told["asks"]]
        cell = decode(lm, asks, told["clients"], told["method"])
        print(json.dumps(cell), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
