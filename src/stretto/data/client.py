"""A client of any OpenAI-wire endpoint: retries, a ledger of tokens and money, a spending cap.

Shared by whoever pays for replies: annotating teachers and judges. Keeping replies is the caller's.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stretto.data.annotators import Exhausted, Unanswered
from stretto.data.deadline import Deadline
from stretto.data.wire import count_in, first_line, is_text, retry_after
from stretto.errors import InvalidInput

Message = Mapping[str, str]
"""`role` and `content`."""

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0
CHARS_PER_TOKEN, BYTES_PER_TOKEN = 2, 3
"""For a bound on a text's tokens before the endpoint counts them: texts have more."""
TOKENS_PER_MESSAGE = 8
"""A bound on what a chat template adds to each message."""
WITHOUT_TEXT = frozenset({"length", "content_filter"})
"""Finish reasons of replies that may rightly have no text: all tokens went into thoughts, or what
was said is withheld. Asked again, they would be paid again."""
MIN_KEY = 8
"""A shorter key is a placeholder, such as a local server's, and no secret."""

RETRIED = frozenset({408, 409, 425, 429})
OF_THE_REQUEST = frozenset({400, 413, 422})
"""Refusals that are about one request, such as a prompt that is too long."""


class Refused(InvalidInput):
    """The endpoint will not answer this request; others it may."""


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask. `url`: up to its /v1, None for OpenAI's own. `timeout_s`: of a try, to
    the last byte of the reply. Prices are in dollars for a million tokens; `max_cost` needs them.
    Raises `InvalidInput` for values that do not fit."""

    model: str
    url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0
    max_attempts: int = 6
    max_tokens: int = 2048
    price_in: float | None = None
    price_out: float | None = None
    max_cost: float | None = None

    def __post_init__(self) -> None:
        if self.max_cost is not None and (self.price_in is None or self.price_out is None):
            raise InvalidInput(
                "a spending cap needs the prices of a million tokens in and out; give both"
            )
        if self.max_attempts < 1:
            raise InvalidInput(f"attempts must be at least 1, got {self.max_attempts}")
        if not 0 < self.timeout_s < math.inf:
            raise InvalidInput(f"the timeout must be a number above 0 s, got {self.timeout_s}")
        for price in (self.price_in, self.price_out):
            if price is not None and not 0 <= price < math.inf:
                raise InvalidInput(f"a price must be a number from 0 on, got {price}")
        if self.url is not None:
            self._check_url(self.url)

    def _check_url(self, url: str) -> None:
        if "@" in url or "?" in url:
            raise InvalidInput(
                "the endpoint's address has a user or a query in it, where secrets may be; give "
                f"the key in {self.api_key_env}"
            )
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(
                f"the endpoint's address {url!r} does not begin with http:// or https://; give it "
                "as in http://localhost:8000/v1"
            )

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        """Dollars; 0 where there are no prices."""
        return (tokens_in * (self.price_in or 0.0) + tokens_out * (self.price_out or 0.0)) / 1e6


@dataclass(frozen=True)
class Reply:
    """What an endpoint said, and what it counted. `finish_reason` and `model` are its own words.
    `is_lost`: it holds no text, so it is asked for again, and is paid for all the same."""

    text: str
    tokens_in: int
    tokens_out: int
    cost: float
    finish_reason: str | None = None
    model: str | None = None
    is_lost: bool = False


@dataclass
class Ledger:
    """What was asked and paid in this run, and before it if that was added. `estimated` replies
    came without counts, and are booked with bounds on them; `lost` ones without text."""

    requests: int = 0
    retries: int = 0
    failures: int = 0
    estimated: int = 0
    lost: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    _reserved: float = field(default=0.0, repr=False)

    def to_json(self) -> dict[str, Any]:
        names = (
            "requests", "retries", "failures", "estimated", "lost", "tokens_in", "tokens_out",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"cost": round(self.cost, 6)}


class Client:
    """Asks an endpoint, from any number of threads. `sleep` waits; tests give their own."""

    def __init__(self, endpoint: Endpoint, *, sleep: Callable[[float], None] = time.sleep) -> None:
        try:
            import openai
        except ModuleNotFoundError:
            raise InvalidInput(
                "an endpoint is asked with the openai package, which is not installed; "
                "pip install 'stretto-lm[api]'"
            ) from None
        self.endpoint = endpoint
        self.ledger = Ledger()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._key = _key_in(endpoint)
        self._openai = openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=endpoint.url,
            timeout=endpoint.timeout_s,
            max_retries=0,
        )
        self._deadline = Deadline(endpoint.timeout_s)

    def ask(
        self,
        messages: Sequence[Message],
        *,
        on_lost: Callable[[Reply], object] | None = None,
        **params: Any,
    ) -> Reply:
        """One reply. `params` are the wire's own, such as `temperature`. `on_lost` is given each
        reply without text as it comes, to be kept for the sake of what it cost.

        What may pass (no connection, a timeout, 408, 409, 425, 429, 5xx) is tried again up to
        `max_attempts` times, after the endpoint's Retry-After or 1, 2, 4, ... seconds; then
        `Unanswered`. `Exhausted`, before each try, where the worst case would pass `max_cost`.
        `Refused` for a request that it will not answer, `InvalidInput` for what no request will
        pass, such as a wrong key. The key is in no message, and in no reply.
        """
        if not all(is_text(message["content"]) for message in messages):
            raise Refused("a lone surrogate is in what was to be asked, and no request can hold it")
        for attempt in range(self.endpoint.max_attempts):
            with self._reserved(messages):  # anew each time: what was no reply may have cost too
                said = self._try_once(messages, params)
                if isinstance(said, Reply) and said.is_lost and on_lost is not None:
                    on_lost(said)
            if isinstance(said, Reply) and not said.is_lost:
                return said
            if attempt + 1 < self.endpoint.max_attempts:
                with self._lock:
                    self.ledger.retries += 1
                usual_s = min(FIRST_WAIT_S * 2**attempt, MAX_WAIT_S)
                self._sleep(said if isinstance(said, float) else usual_s)
        with self._lock:
            self.ledger.failures += 1
        raise Unanswered(
            f"{self.endpoint.model} did not answer in {self.endpoint.max_attempts} attempts; "
            "run it again later"
        )

    def close(self) -> None:
        self._deadline.close(self._openai.close())

    def _try_once(
        self, messages: Sequence[Message], params: dict[str, Any]
    ) -> Reply | float | None:
        """A reply, maybe a lost one; or how long to wait before the next try, None where nothing
        says."""
        import openai

        limit = {"max_tokens": self.endpoint.max_tokens}
        if "max_completion_tokens" in params:
            limit = {}
        try:
            answer = self._deadline.run(
                self._openai.chat.completions.create(
                    model=self.endpoint.model,
                    messages=[dict(m) for m in messages],  # type: ignore[misc]
                    **limit | params,
                )
            )
        except openai.APIStatusError as error:
            if error.status_code not in RETRIED and error.status_code < 500:
                kind = Refused if error.status_code in OF_THE_REQUEST else InvalidInput
                raise kind(
                    f"{self.endpoint.model} refused with status {error.status_code}: "
                    f"{first_line(self._scrubbed(str(error)))}; check model, address and key"
                ) from None
            return retry_after(error.response.headers.get("retry-after"))
        except (
            openai.APIConnectionError, openai.APIResponseValidationError, ValueError,
            RecursionError, TimeoutError,
        ):  # fmt: skip
            return None
        return self._booked(answer, most_tokens(messages))

    def _booked(self, answer: Any, most_in: int) -> Reply | None:
        """The reply in a response, its tokens in the ledger; None for a response that neither holds
        one nor counts any tokens."""
        choices = getattr(answer, "choices", None)
        choice: Any = choices[0] if isinstance(choices, list) and choices else None
        reason = self._word(getattr(choice, "finish_reason", None))
        text = getattr(getattr(choice, "message", None), "content", None)
        if text is None and reason in WITHOUT_TEXT:
            text = ""
        usage = getattr(answer, "usage", None)
        tokens_in = count_in(usage, "prompt_tokens")
        tokens_out = count_in(usage, "completion_tokens")
        is_lost = not isinstance(text, str)
        text = self._word(text) or ""
        is_estimated = not tokens_in and choice is not None
        if is_estimated:
            tokens_in, tokens_out = most_in, most_tokens([{"content": text}])
        cost = self.endpoint.cost(tokens_in, tokens_out)
        is_paid = tokens_in + tokens_out > 0
        with self._lock:
            self.ledger.requests += 1
            self.ledger.estimated += is_estimated
            self.ledger.lost += is_lost and is_paid
            self.ledger.tokens_in += tokens_in
            self.ledger.tokens_out += tokens_out
            self.ledger.cost += cost
        if is_lost and not is_paid:
            return None
        model = self._word(getattr(answer, "model", None))
        return Reply(text, tokens_in, tokens_out, cost, reason, model, is_lost)

    def _word(self, value: Any) -> str | None:
        return self._scrubbed(value) if isinstance(value, str) else None

    def _scrubbed(self, text: str) -> str:
        """What the endpoint says, without the key if it should say that too."""
        return text.replace(self._key, "[key]") if len(self._key) >= MIN_KEY else text

    @contextmanager
    def _reserved(self, messages: Sequence[Message]) -> Iterator[None]:
        """Sets aside the most that one reply can cost, waiting for what others have set aside.
        Raises `Exhausted`."""
        most = self.endpoint.cost(most_tokens(messages), self.endpoint.max_tokens)
        cap, ledger = self.endpoint.max_cost, self.ledger
        with self._freed:
            while cap is not None and ledger.cost + ledger._reserved + most > cap:
                if ledger.cost + most > cap:
                    raise Exhausted(
                        f"the next request could pass the cap of ${cap:g}: ${ledger.cost:.4f} "
                        "are spent; raise the cap to go on"
                    )
                self._freed.wait()
            ledger._reserved += most
        try:
            yield
        finally:
            with self._freed:
                ledger._reserved -= most
                self._freed.notify_all()


def most_tokens(messages: Sequence[Message]) -> int:
    """A bound from above on the tokens of messages in nearly any tokenizer."""
    texts = [message["content"] for message in messages]
    return sum(
        max(len(text) // CHARS_PER_TOKEN, len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)
        + TOKENS_PER_MESSAGE
        for text in texts
    )


def _key_in(endpoint: Endpoint) -> str:
    """The key in the environment; empty where an endpoint of one's own has none."""
    name = endpoint.api_key_env
    key = os.environ.get(name, "").strip()
    if not key and endpoint.url is None:
        raise InvalidInput(f"environment variable {name} is not set; set it to your key")
    if not (key.isascii() and key.isprintable()):
        raise InvalidInput(
            f"environment variable {name} holds no key: it has characters that no key has; set it "
            "anew"
        )
    return key
