"""What the load benchmark sends, and what a client saw of each answer. Standard library only, so
that a client costs little beside the server."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

CHAT = "/v1/chat/completions"
LENGTHS = (24, 96, 48, 160)
"""Most tokens of an answer, in turn."""
TIMEOUT_S = 1800.0
NEAR_TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may be either, in float32."""


@dataclass(frozen=True)
class Ask:
    """Request `number` of a level; the same one in every level."""

    number: int
    prompt: str
    max_tokens: int


def asks_of(prompts: Sequence[str], count: int) -> list[Ask]:
    """So many requests over prompts in turn, of mixed lengths. A prompt comes with another length
    each time."""
    places = (divmod(number, len(prompts)) for number in range(count))
    return [
        Ask(number, prompts[place], LENGTHS[(turn + place) % len(LENGTHS)])
        for number, (turn, place) in enumerate(places)
    ]


@dataclass
class Seen:
    """An answer as its client saw it. Times are seconds since the request was sent."""

    number: int
    max_tokens: int
    error: str | None = None
    finish_reason: str | None = None
    text: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    drawn_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """For a row of raw results: the time to the first text, and from each to the next."""
        times = [round(t, 5) for t in self.arrivals_s]
        gaps = [round(b - a, 5) for a, b in pairwise(times)]
        return {
            "request": self.number, "max_tokens": self.max_tokens, "error": self.error,
            "finish_reason": self.finish_reason, "text": self.text, "tokens": self.tokens,
            "ttft_s": times[0] if times else None, "gaps_s": gaps,
            "total_s": round(self.total_s, 5), "drawn_tokens": self.drawn_tokens,
        }  # fmt: skip


@dataclass(frozen=True)
class Address:
    """A server, and the name and method to ask it for."""

    host: str
    port: int
    model: str
    method: str = "auto"

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def body(self, ask: Ask) -> bytes:
        """Greedy, streamed, with log-probs, by which near ties are known."""
        return json.dumps(
            {
                "model": self.model, "temperature": 0, "max_tokens": ask.max_tokens,
                "messages": [{"role": "user", "content": ask.prompt}], "logprobs": True,
                "stream": True, "stream_options": {"include_usage": True},
                "stretto": {"method": self.method},
            }
        ).encode()  # fmt: skip


def answer(address: Address, ask: Ask) -> Seen:
    """Asks, and reads the answer to its end. Whatever goes wrong, in the server or here, is in
    `error`."""
    seen = Seen(ask.number, ask.max_tokens)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    begun = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", CHAT, address.body(ask), headers)
        response = connection.getresponse()
        if response.status != 200:
            seen.error = f"{response.status} {response.read(500).decode(errors='replace')}"
            return seen
        for line in iter(response.readline, b""):
            if line.startswith(b"data: {"):
                _take(seen, json.loads(line[6:]), time.perf_counter() - begun)
            elif line.startswith(b"data: [DONE]"):
                break
        else:
            seen.error = seen.error or "the stream ended before its last line"
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        seen.total_s = time.perf_counter() - begun
    return seen


def _take(seen: Seen, chunk: dict[str, Any], now_s: float) -> None:
    if "error" in chunk:
        seen.error = chunk["error"]["message"]
        return
    usage = chunk.get("usage")
    if usage is not None:
        seen.drawn_tokens = sum(
            usage[f"{kind}_tokens"] for kind in ("completion", "control", "cut")
        )
    for choice in chunk["choices"]:
        piece = choice["delta"].get("content") or ""
        if piece:
            seen.arrivals_s.append(now_s)
            seen.text += piece
        for token in (choice["logprobs"] or {}).get("content") or []:
            seen.tokens.append((token["token"], token["logprob"]))
        seen.finish_reason = choice["finish_reason"] or seen.finish_reason


def crowd(address: Address, asks: Sequence[Ask], num_clients: int) -> tuple[list[Seen], float]:
    """Answers to all requests, in their order, asked by so many clients each of which asks for the
    next one when it has its answer; and the seconds until the last one has. Raises `RuntimeError`
    if a request is not among them, since its client died."""
    waiting = deque(asks)
    found: list[Seen] = []

    def client() -> None:
        while True:
            try:
                ask = waiting.popleft()
            except IndexError:
                return
            found.append(answer(address, ask))

    threads = [threading.Thread(target=client, daemon=True) for _ in range(num_clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    if len(found) != len(asks):
        raise RuntimeError(f"{len(asks) - len(found)} of {len(asks)} requests were lost")
    return sorted(found, key=lambda seen: seen.number), seconds


Row = dict[str, Any]


def compared(alone: Row, row: Row) -> tuple[str, float | None]:
    """How an answer differs from the one that was decoded alone, and by how much the two tokens'
    log-probabilities differ where they first do.

    "same"; "near tie": the first tokens that differ were as likely up to `NEAR_TIE`, and neither
    likelier than half, as two that tie must be; "different".
    """
    if row["text"] == alone["text"]:
        return "same", None
    for (mine, logprob), (other, reference) in zip(row["tokens"], alone["tokens"], strict=False):
        if mine != other:
            gap = abs(logprob - reference)
            is_tie = gap < NEAR_TIE and max(logprob, reference) <= math.log(0.5) + NEAR_TIE
            return ("near tie" if is_tie else "different"), gap
    return "different", None
