"""A conversation: what was asked and answered, as the next question's prompt and as a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.completion import Completion


@dataclass(frozen=True)
class Turn:
    """A question and its answer, whole or as far as it came."""

    prompt: str
    completion: Completion

    def to_json(self) -> dict[str, Any]:
        """What `stretto run --json` prints, and the question."""
        return {"prompt": self.prompt, **self.completion.to_json()}


@dataclass
class Conversation:
    """Turns under one system message, or none.

    An answer goes on in the history as its text, without annotations: what a client of the server
    would send back.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, prompt: str | None = None) -> list[dict[str, str]]:
        """The conversation so far, and `prompt` as its next question."""
        found = [] if self.system is None else [_message("system", self.system)]
        for turn in self.turns:
            found.append(_message("user", turn.prompt))
            found.append(_message("assistant", turn.completion.text))
        return found if prompt is None else [*found, _message("user", prompt)]

    def before_last(self) -> Conversation:
        """The conversation without its last turn."""
        return Conversation(self.system, self.turns[:-1])

    def to_json(self, model: str) -> dict[str, Any]:
        """What `/save` writes: messages as the API takes them, and each turn with its figures."""
        return {
            "model": model,
            "messages": self.messages(),
            "turns": [turn.to_json() for turn in self.turns],
        }


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
