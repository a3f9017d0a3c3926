"""A tokenizer over a small vocabulary of one's own: each symbol a token, any other text as bytes.

Nothing is normalised and nothing is cut at spaces, so every text comes back as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stretto.errors import InvalidInput
from stretto.files import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END: Final = "<|end|>"
"""Ends an answer; id 0."""
ANSWER: Final = "<|answer|>"
"""Stands between a question and its answer; id 1."""
BYTES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))

TEXT_FIELDS: Final = (
    "prompt", "instruction", "question", "problem",
    "response", "answer", "output", "solution", "text",
)  # fmt: skip

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ message.content }}" + ANSWER + "{% elif "
    "message.role == 'assistant' %}{{ message.content }}" + END + "{% else %}"
    "{{ raise_exception('this model knows the roles user and assistant alone') }}"
    "{% endif %}{% endfor %}"
)
"""A question, the mark of its answer, the answer and its end; and so on."""


def read_symbols(file: Path) -> list[str]:
    """The symbols in a file that holds a JSON list of strings. Raises `InvalidInput`."""
    try:
        found = parse_json(file.read_bytes())
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise InvalidInput(f"{file} is no JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InvalidInput(f"{file} is no list of strings; write it as a JSON list of symbols")
    return checked_symbols(found, str(file))


def learn_symbols(files: Iterable[Path]) -> list[str]:
    """All characters of the prompts and responses in files of rows, sorted.

    Raises `InvalidInput` for a file that cannot be read, or that has no text in any row.
    """
    from stretto.data.rows import read_lines

    characters: set[str] = set()
    for file in files:
        own: set[str] = set()
        for _, row in read_lines(file):
            for name in TEXT_FIELDS:
                if isinstance(row.get(name), str):
                    own.update(row[name])
        if not own:
            raise InvalidInput(
                f"{file} has no text in {', '.join(TEXT_FIELDS)}; name a file of rows with texts"
            )
        characters |= own
    return checked_symbols(sorted(characters), "the rows")


def checked_symbols(symbols: Sequence[str], source: str) -> list[str]:
    """The symbols as a list. Raises `InvalidInput`, naming `source`, for what is no vocabulary."""
    if not symbols:
        raise InvalidInput(f"{source}: a vocabulary needs at least one symbol")
    seen: set[str] = set()
    for symbol in symbols:
        if not symbol:
            raise InvalidInput(f"{source} has an empty symbol; leave it out")
        if symbol in seen:
            raise InvalidInput(f"{source} has {symbol!r} twice; leave one out")
        if symbol in (END, ANSWER, *BYTES):
            raise InvalidInput(f"{source} has {symbol!r}, which has a meaning; leave it out")
        if any("\ud800" <= character <= "\udfff" for character in symbol):
            raise InvalidInput(f"{source} has {symbol!a}, a lone surrogate; leave it out")
        seen.add(symbol)
    return list(symbols)


def make_backend(symbols: Sequence[str]) -> Tokenizer:
    """The tokenizer of checked symbols. Where several begin at one place the longest is taken.

    Ids: `END`, `ANSWER`, the symbols in their order, then one of each byte.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate((END, ANSWER, *symbols, *BYTES))}
    # Every piece is a symbol or one character: it is looked up whole, or falls back to its bytes.
    backend = Tokenizer(models.BPE(vocabulary, merges=[], ignore_merges=True, byte_fallback=True))
    longest_first = sorted((s for s in symbols if len(s) > 1), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (END, ANSWER)]
    )
    return backend


def make_tokenizer(symbols: Sequence[str]) -> Any:
    """The tokenizer as transformers takes it, with its end and `CHAT_TEMPLATE`."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_backend(symbols), eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
