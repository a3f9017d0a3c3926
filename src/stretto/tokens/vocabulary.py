"""The vocabulary of a Hugging Face fast tokenizer, its control tokens out of reach of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from stretto.errors import InvalidInput
from stretto.tokens.chat import ChatEncoder, Render, check_messages, template_of
from stretto.tokens.control import check_control_ids, control_content
from stretto.tokens.exact import ExactTokenizer, added_tokens, check_probes

REASONING_ENDS = ("</think>", "[/THINK]")
"""Added tokens at which a model's reasoning ends; the first one that a tokenizer has counts."""


class HFVocabulary:
    """Text to ids and back for any fast tokenizer; implements `stretto.dialects.base.Vocabulary`.

    `backend` is read, never changed. `control` maps names to ids, `forms` the same names to their
    text forms. `size` is the number of rows of the output head. `render` renders a chat, or is
    None. `source` names the tokenizer in errors.

    Raises `InvalidInput` if the tokenizer does not bring ordinary text back as it was, if it
    splits a control token, or if text can produce a control id.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        control: Mapping[str, int],
        forms: Mapping[str, str],
        size: int,
        end_ids: frozenset[int],
        render: Render | None = None,
        source: str = "this model",
    ) -> None:
        if set(control) != set(forms):
            odd = ", ".join(sorted(set(control) ^ set(forms)))
            raise InvalidInput(f"control tokens and text forms of {source} differ in: {odd}")
        if outside := [i for i in end_ids if not 0 <= i < size]:
            raise InvalidInput(f"end id {outside[0]} of {source} is outside its {size} rows")
        check_control_ids(backend, control, size=size, end_ids=end_ids)
        self.control: Mapping[str, int] = dict(control)
        self.end_ids = end_ids
        self._size = size
        added = added_tokens(backend)
        inert = frozenset(t.id for t in added if t.special) | frozenset(control.values()) | end_ids
        ends = [t.id for word in REASONING_ENDS for t in added if t.content == word]
        self.reasoning_end = next(iter(ends), None)
        literal = {control[name]: forms[name] for name in control}
        self._exact = ExactTokenizer(backend, inert, literal)
        words = backend.get_vocab(with_added_tokens=True)
        self._known = {*words.values(), *control.values()}
        self._longest = max(map(len, words), default=1)
        reserved = [t.content for t in added if t.id in inert]
        reserved += map(control_content, control)
        check_probes(self._exact, source, extra=[*reserved, *forms.values()])
        self._prefix = _leading_special_ids(backend)
        self._chat = render and ChatEncoder(
            backend, render, reserved=reserved, special=inert, encode_text=self._exact.encode
        )

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        *,
        control: Mapping[str, int],
        forms: Mapping[str, str],
        size: int,
        end_ids: frozenset[int] | None = None,
    ) -> HFVocabulary:
        """The vocabulary of a fast tokenizer of transformers, its chat template included.

        `end_ids`: by default the tokenizer's end of sequence alone.
        """
        source = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise InvalidInput(f"{source} has no fast tokenizer; save it with a tokenizer.json")
        if end_ids is None:
            eos = tokenizer.eos_token_id
            end_ids = frozenset() if eos is None else frozenset({eos})
        return cls(
            backend,
            control=control,
            forms=forms,
            size=size,
            end_ids=end_ids,
            render=template_of(tokenizer),
            source=source,
        )

    @property
    def size(self) -> int:
        """Rows of the output head; every id is below it."""
        return self._size

    @cached_property
    def spare_ids(self) -> frozenset[int]:
        """Ids below `size` that no token has, control tokens aside: never to be drawn."""
        return frozenset(range(self._size)) - self._known

    @property
    def prefix(self) -> list[int]:
        """The special ids that the tokenizer puts before a text, such as a begin of sequence."""
        return list(self._prefix)

    def least_tokens(self, text: str) -> int:
        """A bound from below on the ids of a text, without encoding it."""
        return -(-len(text) // self._longest)

    def encode(self, text: str) -> list[int]:
        """Ids of a run of text: nothing inserted, no special, end or control token recognised.

        Added tokens that are not special (such as runs of spaces) are used as in training.
        `decode` gives `text` back; `InvalidInput` for text with characters that have no token.
        """
        return self._exact.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a run of ids, without clean-up; a control id gives its text form.

        Special tokens give their content, spare ids `<|id|>`, incomplete UTF-8 U+FFFD.
        """
        return self._exact.decode(ids)

    def piece(self, token: int) -> str:
        """The text of one id, as in `decode`."""
        return self._exact.decode([token])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat of messages with `role` and `content`, rendered by the chat template.

        The template's special tokens are recognised, those written in a message are text. Without
        such strings in a message the ids are those of transformers' `apply_chat_template`. A
        tokenizer without a chat template gets the special ids it puts first (if any) and the
        contents as plain text, a blank line between them.
        """
        checked = check_messages(messages)
        if self._chat is None:
            text = "\n\n".join(message["content"] for message in checked)
            return [*self._prefix, *self.encode(text)]
        for message in checked:
            self.encode(message["content"])  # raises for text that would be lost
        return self._chat.encode(checked, add_generation_prompt)


def _leading_special_ids(backend: Tokenizer) -> list[int]:
    """The special ids that a tokenizer puts before a text, such as a beginning of sequence."""
    encoding = backend.encode("a", add_special_tokens=True)
    ids: list[int] = []
    for token, special in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
        if not special:
            break
        ids.append(token)
    return ids
