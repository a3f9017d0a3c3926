"""A vocabulary from a tokenizer file alone, without torch or transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stretto.errors import InvalidInput, ModelUnavailable
from stretto.files import parse_json
from stretto.tokens.card import CARD, ModelCard
from stretto.tokens.control import find_control_tokens
from stretto.tokens.vocabulary import HFVocabulary


def load_vocabulary(path: Path | str, control_names: Mapping[str, str]) -> HFVocabulary:
    """The vocabulary of a `tokenizer.json`, or of a folder with one.

    `control_names` maps a dialect's control tokens to their text forms. Their ids are those of
    `stretto.json` beside the file if it has the same names; else those of the tokenizer's own
    `<|stretto:…|>` tokens; else new ones beyond its own. `size` is the largest id + 1.
    Chats are not rendered: `encode_chat` gives plain text. Raises `InvalidInput`.
    """
    path = Path(path)
    file = path / "tokenizer.json" if os.path.isdir(path) else path
    backend = read_tokenizer(file)
    end_ids = read_end_ids(file.parent, backend)
    card = ModelCard.load(file.parent)
    if control_names and set(card.control) == set(control_names):
        card.check_tokenizer(backend, file.parent / CARD)
        control = card.control
    else:
        control = find_control_tokens(backend, control_names)
    ids = {*backend.get_vocab(with_added_tokens=True).values(), *control.values(), *end_ids}
    return HFVocabulary(
        backend,
        control=control,
        forms=control_names,
        size=max(ids) + 1,
        end_ids=end_ids,
        source=str(file),
    )


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`; raises `ModelUnavailable` if there is none to read."""
    if not os.path.isfile(file):
        raise ModelUnavailable(f"{file} does not exist; name a tokenizer.json or its folder")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ModelUnavailable(f"{file} is no tokenizer: {error}") from None


def read_end_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a sequence, as a model's folder says; empty if it says nothing.

    Read from the first file that has them: `generation_config.json`, `config.json`, and the end
    of sequence in `tokenizer_config.json`.
    """
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(i, int) for i in ids):
                raise InvalidInput(
                    f"{folder / name} has eos_token_id {found!r}, expected whole numbers"
                )
            return frozenset(ids)
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    end = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return frozenset() if end is None else frozenset({end})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is unreadable: {error}") from None
    return content if isinstance(content, dict) else {}
