"""A private copy of a tokenizer that maps text to ids and back without loss.

A tokenizer file describes how prompts were prepared in training: prefix spaces, Unicode
normalisation, special tokens recognised anywhere. Runs of a trace need the opposite: any text is
only text and comes back as it was. The copy differs from the original only where that is at stake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from stretto.errors import InvalidInput

PROBES = (
    "Hello world",
    " a leading space",
    "a trailing space ",
    "two  spaces,   three\n\n\tand a tab\n",
    "CR LF\r\nand CR\r.",
    "don't  clean this , up . n't 's !",
    "0123456789 1,000 3.14",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    'f(x) = {"key": [1, 2]}  # code',
    "<s> </s> <unk> [UNK] <pad> <b>bold</b>",
    "Üb\u00ear n\u00e9e, ne\u0301e \u212b",
    "日本語 русский العربية हिन्दी",
    "👩\u200d👩\u200d👧 🇫🇷 ☕\ufe0f",
)


@dataclass(frozen=True)
class AddedToken:
    """A token that the tokenizer recognises in text before its model sees it."""

    id: int
    content: str
    special: bool


def added_tokens(backend: Tokenizer) -> tuple[AddedToken, ...]:
    """The added tokens of a tokenizer, special or not, by id."""
    found = backend.get_added_tokens_decoder()
    return tuple(AddedToken(i, found[i].content, found[i].special) for i in sorted(found))


def private_copy(backend: Tokenizer, inert: frozenset[int]) -> Tokenizer:
    """A copy of `backend` in which `inert` ids are never recognised and nothing is inserted.

    Left out: those added tokens, post-processing, truncation, padding, merge dropout, the prefix
    space of byte-level and sentencepiece tokenizers, and NFC normalisation (text already in NFC
    gets the same ids). Other lossy steps are kept; `check_probes` meets them.
    """
    spec = json.loads(backend.to_str())
    spec.update(truncation=None, padding=None, post_processor=None)
    names = {token["content"] for token in spec["added_tokens"] if token["id"] in inert}
    spec["added_tokens"] = [
        {**token, "lstrip": False, "rstrip": False}
        for token in spec["added_tokens"]
        if token["id"] not in inert
    ]
    spec["normalizer"] = _without(spec["normalizer"], "normalizers", ("NFC", "Prepend"))
    spec["decoder"] = _without(spec["decoder"], "decoders", ("Strip",))
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        _clear_prefix(spec[part])
    _forget_words(spec["model"], names)
    return Tokenizer.from_str(json.dumps(spec))


def _without(part: Any, members: str, kinds: Sequence[str]) -> Any:
    """A component, or its members if it is a sequence, without those of some kinds."""
    if part is None or part["type"] in kinds:
        return None
    if part["type"] != "Sequence":
        return part
    kept = [_without(member, members, kinds) for member in part[members]]
    return {**part, members: [member for member in kept if member is not None]}


def _clear_prefix(part: Any) -> None:
    """Turn off every prefix space in a component, in place."""
    if isinstance(part, list):
        for member in part:
            _clear_prefix(member)
    if isinstance(part, dict):
        if "prepend_scheme" in part:
            part["prepend_scheme"] = "never"
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
        for value in part.values():
            _clear_prefix(value)


def _forget_words(model: dict[str, Any], names: set[str]) -> None:
    """Take inert words out of a vocabulary that is asked for whole words, in place."""
    if model.get("dropout") is not None:
        model["dropout"] = None
    if model.get("ignore_merges"):
        for name in names - {model.get("unk_token")}:
            model["vocab"].pop(name, None)


class _OrdinaryEnd(InvalidInput):
    """An end id that is no added token: text must not end a sequence."""


class ExactTokenizer:
    """Ids of a run of text and back. `inert` ids are never produced, `literal` ids have fixed text.

    `literal` holds the text of ids that are decoded by themselves: added and control tokens.
    """

    def __init__(
        self, backend: Tokenizer, inert: frozenset[int], literal: Mapping[int, str]
    ) -> None:
        self._backend = private_copy(backend, inert)
        self._inert = inert
        self._literal = {token.id: token.content for token in added_tokens(backend)} | {**literal}

    def encode(self, text: str) -> list[int]:
        """Ids of a run of text. Raises `InvalidInput` if they would not decode to `text`.

        That happens with characters that a vocabulary lacks (some byte-level ones lack rare
        control characters) and with lone surrogates, which are not text.
        """
        if not text:
            return []
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidInput(_surrogate_message(text)) from None
        if (back := self.decode(ids)) != text:
            raise InvalidInput(_loss_message(text, back))
        if not self._inert.isdisjoint(ids):
            bad = next(i for i in ids if i in self._inert)
            name = self._literal.get(bad)
            if name is None:
                raise _OrdinaryEnd(
                    f"id {bad} ends sequences here but is the ordinary text {self.decode([bad])!r};"
                    " set eos_token_id in the model's config and generation config to the"
                    " tokenizer's"
                )
            raise InvalidInput(
                f"text gives the special token {name!r} (id {bad}), which this tokenizer cannot "
                "read as text; remove it"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a run of ids; ids that no token has show as `<|id|>`."""
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            literal = self._literal.get(i)
            if literal is None and self._backend.id_to_token(i) is None:
                literal = f"<|{i}|>"
            if literal is None:
                run.append(i)
                continue
            parts += [self._decode_run(run), literal]
            run = []
        return "".join([*parts, self._decode_run(run)])

    def _decode_run(self, run: list[int]) -> str:
        return str(self._backend.decode(run, skip_special_tokens=False)) if run else ""


def check_probes(tokenizer: ExactTokenizer, source: str, extra: Sequence[str] = ()) -> None:
    """Raise `InvalidInput` naming the first probe that does not come back as it was."""
    for probe in (*PROBES, *extra):
        try:
            tokenizer.encode(probe)
        except _OrdinaryEnd as error:
            raise InvalidInput(f"the tokenizer of {source} does not fit: {error}") from None
        except InvalidInput as error:
            raise InvalidInput(
                f"the tokenizer of {source} does not round-trip {probe!r} ({error});"
                " use a byte-level one"
            ) from None


def _surrogate_message(text: str) -> str:
    at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), 0)
    return f"text has a lone surrogate (U+{ord(text[at]):04X}) at offset {at}; remove it"


def _loss_message(text: str, back: str) -> str:
    pairs = zip(text, back, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(back)))
    if at == len(text):
        return f"text {text[-20:]!r} comes back longer, ending in {back[-20:]!r}"
    return (
        f"{text[at]!r} (U+{ord(text[at]):04X}) at offset {at} is not in the tokenizer's"
        " vocabulary; remove or replace it"
    )
