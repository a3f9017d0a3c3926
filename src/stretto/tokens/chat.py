"""Chat messages to ids: the template's special tokens count, those in a message are only text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from stretto.errors import InvalidInput

Render = Callable[[list[dict[str, str]], bool], str]
ROLES = ("system", "developer", "user", "assistant", "tool")

# A mark stands for hidden text while a template is rendered: private-use characters around digits.
MARK = re.compile("\uf8fe([\ue000-\ue009]+)\uf8ff")
MARK_CHARACTERS = re.compile("[\uf8fe\uf8ff\ue000-\ue009]+")


class ChatEncoder:
    """Encodes rendered chats with `backend`, the tokenizer as it came.

    `reserved`: strings that a message must not turn into tokens (contents of special and control
    tokens). `special`: ids that a template may produce and a message may not.
    `encode_text`: ids of a run of text with all of them inert.
    """

    def __init__(
        self,
        backend: Tokenizer,
        render: Render,
        *,
        reserved: Sequence[str],
        special: frozenset[int],
        encode_text: Callable[[str], list[int]],
    ) -> None:
        self._backend = backend
        self._render = render
        self._reserved = sorted({word for word in reserved if word}, key=len, reverse=True)
        cuts = [(word, cut) for word in self._reserved for cut in range(1, len(word))]
        self._begins = tuple({word[:cut] for word, cut in cuts})
        self._ends = tuple({word[cut:] for word, cut in cuts})
        self._pattern = re.compile("|".join(map(re.escape, self._reserved)) or "(?!)")
        self._special = special
        self._encode_text = encode_text

    def encode(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        """Ids of a chat; raises `InvalidInput` if the template refuses the messages.

        Without reserved strings in any content these are the ids of transformers'
        `apply_chat_template`; with them, the same except that those strings are ordinary text.
        """
        hidden: list[str] = []
        masked = [{**m, "content": self._hide(m["content"], hidden)} for m in messages]
        text = self._render(masked, add_generation_prompt)
        shown = _shown(text, hidden)
        plain: list[int] = self._backend.encode(shown, add_special_tokens=False).ids
        if not hidden:  # nothing that is reserved stands in a message
            return plain
        special = [t for t in self._tokens(text) if t.id in self._special]
        forged = any(self._pattern.search(m["content"]) for m in messages)
        if not forged and [i for i in plain if i in self._special] == [t.id for t in special]:
            return plain
        ids: list[int] = []
        end = 0
        for token in special:
            ids += [*self._encode_text(_shown(text[end : token.start], hidden)), token.id]
            end = token.end
        return ids + self._encode_text(_shown(text[end:], hidden))

    def _tokens(self, text: str) -> list[_Token]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [_Token(i, start, end) for i, (start, end) in pairs]

    def _hide(self, content: str, hidden: list[str]) -> str:
        """Put marks for all that is, or could become, part of a reserved string."""
        parts: list[str] = []
        end = 0
        for start, stop in _merged(self._dangerous(content)):
            parts += [content[end:start], _mark(len(hidden))]
            hidden.append(content[start:stop])
            end = stop
        return "".join([*parts, content[end:]])

    def _dangerous(self, content: str) -> Iterator[tuple[int, int]]:
        """Places of reserved strings, of marks, and of ends that text around could complete."""
        for pattern in (self._pattern, MARK_CHARACTERS):
            yield from (match.span() for match in pattern.finditer(content))
        if content.startswith(self._ends):
            yield from ((0, len(end)) for end in self._ends if content.startswith(end))
        if content.endswith(self._begins):
            size = len(content)
            yield from ((size - len(b), size) for b in self._begins if content.endswith(b))


class _Token(NamedTuple):
    id: int
    start: int
    end: int


def _shown(text: str, hidden: list[str]) -> str:
    """A rendered text with hidden text back in the place of its marks."""
    return MARK.sub(lambda mark: hidden[_number(mark[1])], text)


def _mark(number: int) -> str:
    return f"\uf8fe{''.join(chr(0xE000 + int(digit)) for digit in str(number))}\uf8ff"


def _number(digits: str) -> int:
    return int("".join(str(ord(digit) - 0xE000) for digit in digits))


def _merged(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Copies of messages with a known role and a text each; raises `InvalidInput` for others."""
    if not isinstance(messages, Sequence):
        raise InvalidInput(f"a prompt is text or chat messages, got {messages!r}")
    if not messages:
        raise InvalidInput("a chat needs at least one message")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidInput(f"message {at} is a {type(message).__name__}, not role and content")
        if set(message) != {"role", "content"}:
            keys = ", ".join(sorted(map(str, message))) or "nothing"
            raise InvalidInput(f"message {at} has {keys}; it needs exactly role and content")
        if message["role"] not in ROLES:
            raise InvalidInput(
                f"message {at} has role {message['role']!r}; known: {', '.join(ROLES)}"
            )
        if not isinstance(message["content"], str):
            kind = type(message["content"]).__name__
            raise InvalidInput(f"the content of message {at} is a {kind}; it must be a string")
    return [dict(message) for message in messages]


def template_of(tokenizer: Any) -> Render | None:
    """How a tokenizer of transformers renders a chat; None if it has no chat template."""
    if not tokenizer.chat_template:
        return None

    def render(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:  # a template is a program: it raises anything
            raise InvalidInput(f"the chat template refuses these messages: {error}") from None

    return render
