"""Judge `llm`: a model behind an endpoint compares answers two at a time, in both orders.

PASTA's quality (thesis 3.4): each candidate against the baseline's answer and the reference one,
in both orders, which is four comparisons; the judge names the better answer and its confidence.
Quality is the confidence of the wins over that of the losses.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from stretto.data.annotators import Unanswered
from stretto.data.client import Client, Endpoint, Refused, Reply
from stretto.data.rows import Row
from stretto.data.store import Store
from stretto.errors import InvalidInput
from stretto.eval.judges.base import Comparison, Identity, Measure, Question, Verdict
from stretto.eval.judges.choose import JudgeSettings
from stretto.eval.judges.llm_prompt import (
    FINGERPRINT,
    Ordered,
    again_messages,
    messages_of,
    parse_reply,
)

SMOOTHING = 0.5
"""Added to wins and losses, so that no loss gives a finite quality and no verdict gives 1."""

ATTEMPTS = 2
"""How often one comparison is asked where the reply is no verdict."""

MAX_REPLY_TOKENS = 1024


class JudgeReply(Row):
    """A reply as it came. `id`: a hash of the judge and the two answers in their order. `lost`:
    None but for a reply without text, kept for what it cost: its number among those."""

    kind: ClassVar[str] = "judge-reply"
    id: str
    attempt: int
    text: str
    tokens_in: int
    tokens_out: int
    cost: float
    lost: int | None = None

    @property
    def key(self) -> str:
        return reply_key(self.id, self.attempt, self.lost)


class LLMJudge:
    """Judges by a `Client`. Replies are kept in `replies`, if given, and never asked for again;
    what they cost counts for the client's spending cap.

    `num_garbage` counts replies that were no verdict, `num_missing` comparisons left without one.
    """

    def __init__(
        self, client: Client, replies: Path | None = None, *, concurrency: int = 8
    ) -> None:
        if concurrency < 1:
            raise InvalidInput(f"concurrency must be at least 1, got {concurrency}")
        self.client = client
        self.num_garbage = 0
        self.num_missing = 0
        self._concurrency = concurrency
        self._store = None if replies is None else Store(replies, JudgeReply)
        rows = {} if self._store is None else self._store.rows
        self._texts = {key: row.text for key, row in rows.items() if row.lost is None}
        client.ledger.cost += sum(row.cost for row in rows.values())
        self._turns: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        settings = {"prompt": FINGERPRINT, "smoothing": SMOOTHING, "temperature": 0}
        self._identity = str(Identity("llm", client.endpoint.model, settings))

    @classmethod
    def open(cls, settings: JudgeSettings) -> LLMJudge:
        if settings.model is None:
            raise InvalidInput("judge llm needs the name of the endpoint's model; name it")
        endpoint = Endpoint(
            model=settings.model,
            url=settings.url,
            api_key_env=settings.api_key_env,
            max_tokens=MAX_REPLY_TOKENS,
            price_in=settings.price_in,
            price_out=settings.price_out,
            max_cost=settings.max_cost,
        )
        return cls(Client(endpoint), settings.replies, concurrency=settings.concurrency)

    @property
    def identity(self) -> str:
        return self._identity

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure] | None]:
        """Of each candidate and opponent name: [first, second], what was said with the candidate
        shown first and second: [1 | 0 | -1, confidence], 1 the candidate; null without a verdict.
        """
        if missing := [q for q in questions if not q.opponents]:
            raise InvalidInput(
                "judge llm compares with a baseline's or a reference answer, and there is none "
                f"for {missing[0].prompt[:40]!r}; give one"
            )
        jobs = (
            [
                (q.prompt, candidate, other)
                for candidate in q.candidates
                for other in q.opponents.values()
            ]
            for q in questions
        )
        for question, found in zip(questions, self._both_orders(jobs), strict=True):
            if found is None:
                yield None
                continue
            left = iter(found)
            yield [{name: next(left) for name in question.opponents} for _ in question.candidates]

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        """`quality_of` the verdicts of each candidate."""
        return [[quality_of(m) for m in row] for row in measured]

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """The mean of both orders, so that a judge who prefers a place prefers nothing."""
        jobs = ([(c.prompt, c.a, c.b)] for c in comparisons)
        verdicts: list[Verdict | None] = []
        for found in self._both_orders(jobs):
            orders = [None, None] if found is None else found[0]
            said = [o for o in orders if o is not None]
            if len(said) < 2:
                verdicts.append(None)
                continue
            preference = sum(sign * confidence for sign, confidence in said) / 2
            verdicts.append(Verdict.of(preference, {"orders": orders}))
        return verdicts

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self.client.close()

    # -- asking --------------------------------------------------------------------------------

    def _both_orders(
        self, jobs: Iterator[list[tuple[str, str, str]]]
    ) -> Iterator[list[list[list[float] | None]] | None]:
        """Of each list of (prompt, candidate, opponent): both orders' signs and confidences; None
        for a list with a comparison that got no answer at all in this run."""
        pool = ThreadPoolExecutor(self._concurrency)
        waiting: deque[list[Future[list[float] | None]]] = deque()
        try:
            for job in jobs:
                waiting.append(
                    [
                        pool.submit(self._signed, *item, swapped=swapped)
                        for item in job
                        for swapped in (False, True)
                    ]
                )
                while sum(map(len, waiting)) >= 4 * self._concurrency:
                    yield _gather(waiting.popleft())
            while waiting:
                yield _gather(waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _signed(
        self, prompt: str, candidate: str, other: str, *, swapped: bool
    ) -> list[float] | None:
        """[sign, confidence] of one order, the sign 1 for the candidate; None without verdict.

        An answer held against itself is a tie that nobody need be asked about.
        """
        if candidate == other:
            return [0, 0.0]
        first, second = (other, candidate) if swapped else (candidate, other)
        ordered = self._ordered(prompt, first, second)
        if ordered is None:
            return None
        sign = {"first": 1, "second": -1, "tie": 0}[ordered.better] * (-1 if swapped else 1)
        return [sign, ordered.confidence]

    def _ordered(self, prompt: str, first: str, second: str) -> Ordered | None:
        messages = messages_of(prompt, first, second)
        name = reply_id(self._identity, messages)
        for attempt in range(ATTEMPTS):
            try:
                reply = self._reply(name, attempt, messages)
            except Refused:  # this comparison alone, such as one that is too long
                break
            ordered = parse_reply(reply)
            if ordered is not None:
                return ordered
            with self._lock:
                self.num_garbage += 1
            messages = again_messages(messages, reply)
        with self._lock:
            self.num_missing += 1
        return None

    def _reply(self, name: str, attempt: int, messages: Sequence[Mapping[str, str]]) -> str:
        """A reply from the file, or from the endpoint, then kept before anything else happens.

        The same comparison asked twice at once is paid for once.
        """
        key = reply_key(name, attempt)
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            if key in self._texts:
                return self._texts[key]
            got = self.client.ask(
                messages, on_lost=lambda reply: self._keep(reply, name, attempt), temperature=0
            )
            self._keep(got, name, attempt)
            self._texts[key] = got.text
            return got.text

    def _keep(self, reply: Reply, name: str, attempt: int) -> None:
        """Puts a reply into the file, if there is one."""
        if self._store is None:
            return
        with self._lock:
            key = reply_key(name, attempt)
            lost = self._store.next_number(key) if reply.is_lost else None
            self._store.add(
                JudgeReply(
                    id=name, attempt=attempt, text=reply.text, tokens_in=reply.tokens_in,
                    tokens_out=reply.tokens_out, cost=reply.cost, lost=lost,
                )
            )  # fmt: skip


def reply_key(name: str, attempt: int, lost: int | None = None) -> str:
    """What the reply to a comparison is kept under; its `lost` ones are numbered."""
    return f"{name}/{attempt}" if lost is None else f"{name}/{attempt}/{lost}"


def reply_id(identity: str, messages: Sequence[Mapping[str, str]]) -> str:
    """What a reply is kept under: the same judge, asked the same, is not asked again."""
    what = json.dumps([identity, [dict(m) for m in messages]], ensure_ascii=True)
    return hashlib.sha256(what.encode()).hexdigest()[:24]


def _gather(
    futures: Sequence[Future[list[float] | None]],
) -> list[list[list[float] | None]] | None:
    """Results two by two. Waits for all, so that what was paid for is kept; then raises."""
    unanswered, failure = False, None
    found: list[list[float] | None] = []
    for future in futures:
        try:
            found.append(future.result())
        except Unanswered:
            unanswered = True
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return None if unanswered else [list(p) for p in zip(found[::2], found[1::2], strict=True)]


def quality_of(measure: Mapping[str, Any]) -> float | None:
    """(wins + s) / (losses + s): sums of confidence over opponents and orders, s = `SMOOTHING`.

    Finite, 1 for neutral, from 1/9 to 9 with four comparisons. A tie and confidence 0 count for
    neither. An opponent with an order missing is left out, lest a preferred place count; None if
    none is left.
    """
    whole = [orders for orders in measure.values() if None not in orders]
    if not whole:
        return None
    said = [tuple(order) for orders in whole for order in orders]
    wins = sum(confidence for sign, confidence in said if sign > 0)
    losses = sum(confidence for sign, confidence in said if sign < 0)
    return float((wins + SMOOTHING) / (losses + SMOOTHING))
