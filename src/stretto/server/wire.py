"""Answers as OpenAI's clients read them, whole or in chunks. Two shapes: chat and plain text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json

from stretto.completion import Completion
from stretto.server.order import Drawn

MARK = "\0"
"""Stands in a chunk for what a `Piece` fills in. In no name: those are printable."""


def event_of(chunk: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % to_json(chunk)


class Piece:
    """Events with chunks that are alike but for text and log-probs: what they have in common is
    encoded once, since there is one for each token.

    Made from a chunk with `MARK` as its text and, after it, as its log-probs.
    """

    def __init__(self, chunk: dict[str, Any]) -> None:
        self._head, self._middle, self._tail = event_of(chunk).split(to_json(MARK))

    def event(self, text: str, logprobs: Any) -> bytes:
        filled = (self._head, to_json(text), self._middle, to_json(logprobs), self._tail)
        return b"".join(filled)


class Shape(Protocol):
    """How one kind of request is answered."""

    kind: str
    prefix: str
    kind_of_chunk: str

    def choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        """A whole choice, index and finish_reason aside."""
        ...

    def delta(self, text: str, logprobs: Any, *, is_first: bool) -> dict[str, Any]:
        """A piece of a choice."""
        ...

    def logprobs(self, tokens: Sequence[Drawn]) -> Any: ...


class Chat:
    """POST /v1/chat/completions"""

    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def delta(self, text: str, logprobs: Any, *, is_first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if is_first else {"content": text}
        return {"delta": delta if text or is_first else {}, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[Drawn]) -> Any:
        content = [
            {
                "token": token.text,
                "bytes": list(token.text.encode()),
                "logprob": token.logprob,
                "top_logprobs": [],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class Text:
    """POST /v1/completions"""

    kind = kind_of_chunk = "text_completion"
    prefix = "cmpl-"

    def choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    def delta(self, text: str, logprobs: Any, *, is_first: bool) -> dict[str, Any]:
        return self.choice(text, logprobs)

    def logprobs(self, tokens: Sequence[Drawn]) -> Any:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": [token.start for token in tokens],
        }


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer have in common."""

    shape: Shape
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.shape.kind), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head(self.shape.kind_of_chunk), "choices": choices, **more}

    def _head(self, kind: str) -> dict[str, Any]:
        name = self.shape.prefix + self.id
        return {"id": name, "object": kind, "created": self.created, "model": self.model}


def usage_of(completions: Sequence[Completion], num_samples: int) -> dict[str, Any]:
    """Token counts of an answer: each prompt's once, text tokens, and control tokens apart."""
    first = completions[::num_samples]
    prompt = sum(c.usage.prompt_tokens for c in first)
    text = sum(c.usage.completion_tokens for c in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": text,
        "total_tokens": prompt + text,
        "prompt_tokens_details": {"cached_tokens": sum(c.usage.cached_tokens for c in first)},
        "control_tokens": sum(c.usage.control_tokens for c in completions),
        "cut_tokens": sum(c.usage.cut_tokens for c in completions),
    }


def details_of(completion: Completion) -> dict[str, Any]:
    """The extension's part of a choice: what `stretto run --json` prints, without the text."""
    details = completion.to_json()
    del details["text"], details["finish_reason"], details["model"]
    return details
