"""The annotator `teacher`: a large model behind any OpenAI-wire endpoint, held to strict rules.

Its replies are kept, see `stretto.data.asker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.data.annotators import Annotation, Postponed, Refusal
from stretto.data.asker import Asker, RawReply
from stretto.data.check import Checker
from stretto.data.client import Client, Endpoint
from stretto.data.markup import chunks_of, relengthed, transplanted
from stretto.data.rows import prompt_id
from stretto.data.teacher_prompt import first_messages, marked_texts, repair_messages

CUT_OFF = "length"
"""The finish reason of a reply that reached its limit."""
MENDED = ("bad-tokens",)
"""Issues that counting the chunks anew takes away."""


@dataclass(frozen=True)
class Reading:
    """What a reply came to: an annotated text, or reasons against it, or both."""

    text: str | None
    reasons: list[str]
    told_tokens: tuple[int, ...] = ()


class Teacher(Asker):
    """Asks, reads strictly, asks once more with the reasons, and refuses with them.

    A reply's text must be the response but for whitespace, which is taken from the response. The
    lengths in its promises are measured anew with `checker`'s tokenizer; `details` has the told
    ones. `raw` is the file of replies. Safe to call from `concurrency` threads.
    """

    name = "teacher"

    def __init__(
        self,
        endpoint: Endpoint,
        checker: Checker,
        raw: Path,
        *,
        temperature: float | None = 0.0,
        concurrency: int = 8,
        client: Client | None = None,
    ) -> None:
        super().__init__(
            endpoint, raw, temperature=temperature, concurrency=concurrency, client=client
        )
        self._checker = checker

    def annotate(self, prompt: str, response: str) -> Annotation | Refusal:
        """An annotation that passes the check, or the reasons of the last try.

        Raises `Unanswered` where the endpoint says nothing, refuses this one question, or cuts its
        reply off (a larger limit asks anew), and `Exhausted` at the spending cap.
        """
        messages = first_messages(prompt, response)
        name = prompt_id(prompt)
        reply = self.ask(messages, name, 0)
        reading = self._read(reply, response)
        if reading.reasons:
            first = reading.reasons
            reply = self.ask(repair_messages(messages, reply.text, first), name, 1)
            reading = self._read(reply, response)
            if reading.reasons:
                return Refusal(reading.reasons, reading.text)
        details: dict[str, Any] = {"rounds": reply.round + 1, "told": list(reading.told_tokens)}
        if reply.model is not None:
            details["model"] = reply.model
        assert reading.text is not None
        return Annotation(reading.text, details)

    # -- internals -----------------------------------------------------------------------------

    def _read(self, reply: RawReply, response: str) -> Reading:
        found = marked_texts(reply.text)
        if reply.finish_reason == CUT_OFF and not found:
            raise Postponed(
                f"the reply was cut off at {self._endpoint.max_tokens} tokens; raise the limit to "
                "ask again"
            )
        if not found:
            return Reading(None, ["no-annotated-text: the reply has no <annotated>...</annotated>"])
        moved = (transplanted(marked, response) for marked in found)
        text = next((text for text in moved if text is not None), None)
        if text is None:
            return Reading(found[0], self._checker.reasons(response, found[0]))
        told = tuple(chunk.tokens for chunk in chunks_of(text))
        issues = {issue.code for issue in self._checker.parse(text).issues}
        if not issues - set(MENDED):
            text = relengthed(text, self._checker.count, self._checker.settings.unit)
        return Reading(text, self._checker.reasons(response, text), told)
