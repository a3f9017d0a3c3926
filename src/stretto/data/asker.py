"""Questions to an OpenAI-wire endpoint whose replies are kept: nothing is paid for twice.

Every reply is on disk before it is read, keyed by all that was asked, so that nothing that was
paid for is lost: after a kill, or with a stricter reading, the same questions are answered from the
file.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from stretto.data.annotators import Unanswered
from stretto.data.client import Client, Endpoint, Refused, Reply
from stretto.data.rows import Row
from stretto.data.store import Store


class RawReply(Row):
    """A reply as it came. `asked`: the hash of the whole question, model and settings included.

    `round`: 0 the first, 1 the repair. `cost` in the currency of the prices. `lost`: None but for a
    reply without text, which answers nothing and is kept for what it cost: its number among those.
    """

    kind: ClassVar[str] = "raw reply"
    asked: str
    prompt_id: str
    round: int
    text: str
    finish_reason: str | None = None
    model: str | None = None
    tokens_in: int
    tokens_out: int
    cost: float
    lost: int | None = None

    @property
    def key(self) -> str:
        return self.asked if self.lost is None else f"{self.asked}/{self.lost}"


class Asker:
    """Asks an endpoint, and keeps the replies in the file `raw`. Safe to call from `concurrency`
    threads; `temperature` None leaves it to the endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        raw: Path,
        *,
        temperature: float | None = 0.0,
        concurrency: int = 8,
        client: Client | None = None,
    ) -> None:
        self.concurrency = concurrency
        self._endpoint = endpoint
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._params: dict[str, Any] = {}
        if temperature is not None:
            self._params["temperature"] = temperature
        self._client = Client(endpoint, sleep=self._sleep) if client is None else client
        try:
            self._raw = Store(raw, RawReply)
        except BaseException:
            self._client.close()
            raise
        self.num_from_disk = 0
        self.spent_before = sum(self._cost(reply) for reply in self._raw.rows.values())
        self._client.ledger.cost += self.spent_before

    def ask(self, messages: Sequence[dict[str, str]], name: str, number: int) -> RawReply:
        """A reply from the file, or a new one, which is in the file when this returns.

        `name`: the prompt's id; `number`: which question about it this is. Raises `Unanswered`
        where the endpoint says nothing or refuses this one question, `Exhausted` at the spending
        cap.
        """
        key = self._key(messages)
        with self._lock:
            known = self._raw.rows.get(key)
            if known is not None:
                self.num_from_disk += 1
        return known if known is not None else self._paid(messages, key, name, number)

    def stop(self) -> None:
        """Wakes whoever waits to try again; what is asked already is still read."""
        self._stopped.set()

    def close(self) -> None:
        self._client.close()
        self._raw.close()

    def ledger(self) -> dict[str, Any]:
        """Requests, tokens and money of this run, and what all runs on this file have cost."""
        book = self._client.ledger.to_json()
        total = book.pop("cost")
        run = {"cost": round(total - self.spent_before, 6), "total_cost": total}
        return book | run | {"from_disk": self.num_from_disk}

    # -- internals -----------------------------------------------------------------------------

    def _paid(
        self, messages: Sequence[dict[str, str]], key: str, name: str, number: int
    ) -> RawReply:
        if self._stopped.is_set():
            raise Unanswered("stopped before it was asked")
        keep = partial(self._keep, key=key, name=name, number=number)
        wire = self._wire()
        try:
            reply = self._client.ask(messages, on_lost=keep, **wire)
        except Refused as error:
            self._adapt(str(error))
            if self._wire() == wire:
                raise Unanswered(str(error)) from None
            reply = self._client.ask(messages, on_lost=keep, **self._wire())
        return keep(reply)

    def _keep(self, reply: Reply, *, key: str, name: str, number: int) -> RawReply:
        """Puts a reply into the file, unless its question has one there."""
        with self._lock:
            lost = self._raw.next_number(key) if reply.is_lost else None
            row = RawReply(
                asked=key, prompt_id=name, round=number, text=reply.text, lost=lost,
                finish_reason=reply.finish_reason, model=reply.model,
                tokens_in=reply.tokens_in, tokens_out=reply.tokens_out, cost=reply.cost,
            )  # fmt: skip
            if row.key not in self._raw:
                self._raw.add(row)
        return row

    def _cost(self, reply: RawReply) -> float:
        """What a reply of an earlier run has cost; at today's prices if it was booked without."""
        return reply.cost or self._endpoint.cost(reply.tokens_in, reply.tokens_out)

    def _key(self, messages: Sequence[dict[str, str]]) -> str:
        asked = {
            "model": self._endpoint.model,
            "max_tokens": self._endpoint.max_tokens,
            "temperature": self._params.get("temperature"),
            "messages": list(messages),
        }
        data = json.dumps(asked, sort_keys=True).encode()
        return hashlib.sha256(data).hexdigest()[:32]

    def _wire(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._params)

    def _adapt(self, message: str) -> None:
        """Calls the limit by its newer name from here on if a refusal asks for that."""
        if "max_completion_tokens" in message:
            with self._lock:
                self._params["max_completion_tokens"] = self._endpoint.max_tokens

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise Unanswered("stopped while it waited to ask again")
