"""Control tokens: new ids in a tokenizer, or ids that a model already has to spare."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from stretto.errors import InvalidInput
from stretto.tokens.exact import added_tokens

NOISE = 1e-2  # of new embedding rows, in standard deviations of the existing ones


def control_content(name: str) -> str:
    """The string that stands for a control token in a tokenizer file; never its text form."""
    return f"<|stretto:{name}|>"


def add_control_tokens(tokenizer: Any, names: Iterable[str]) -> dict[str, int]:
    """Add control tokens to a tokenizer after its existing ids and return name to id.

    `tokenizer` is a `tokenizers.Tokenizer` or a fast tokenizer of transformers, and is changed.
    Those already there keep their ids, so a second call changes nothing.
    """
    backend: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    names = list(names)
    missing = [n for n in names if backend.token_to_id(control_content(n)) is None]
    last = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    for step, name in enumerate(missing, start=1):
        token = AddedToken(control_content(name), special=True, normalized=False)
        if backend is tokenizer:
            backend.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token], special_tokens=True)
        if backend.token_to_id(token.content) != last + step:
            raise InvalidInput(
                f"cannot add control token {token.content!r}: the tokenizer gave it id"
                f" {backend.token_to_id(token.content)}, expected {last + step}; map control"
                " tokens to spare ids instead"
            )
    ids = backend.get_vocab(with_added_tokens=True)
    return {name: ids[control_content(name)] for name in names}


def find_control_tokens(backend: Tokenizer, names: Iterable[str]) -> dict[str, int]:
    """Ids of control tokens in a tokenizer; those it lacks get ids beyond all its tokens."""
    ids = backend.get_vocab(with_added_tokens=True)
    beyond = itertools.count(max(ids.values(), default=-1) + 1)
    return {n: ids[c] if (c := control_content(n)) in ids else next(beyond) for n in names}


def check_control_ids(
    backend: Tokenizer, control: Mapping[str, int], *, size: int, end_ids: frozenset[int]
) -> None:
    """Raise `InvalidInput` unless each control id is one of the model's that text cannot give.

    That is: distinct, below `size` (rows of the output head), no end of sequence, and either an
    added token that the tokenizer keeps whole or a row beyond all its tokens.
    """
    added = {token.id: token.content for token in added_tokens(backend)}
    taken: dict[int, str] = {}
    for name, i in control.items():
        label = f"control token {name!r} (id {i})"
        if i in taken:
            raise InvalidInput(f"{label} has the id of {taken[i]!r}; give each its own")
        taken[i] = name
        if not 0 <= i < size:
            raise InvalidInput(f"{label} is outside the model's {size} rows; grow the model first")
        if i in end_ids:
            raise InvalidInput(f"{label} is an end of sequence; choose another id")
        word = backend.id_to_token(i)
        if i not in added and word is not None:
            raise InvalidInput(f"{label} is the ordinary token {word!r}; choose a reserved id")
        if i in added:
            _check_whole(backend, label, added[i], i)


def _check_whole(backend: Tokenizer, label: str, content: str, i: int) -> None:
    ids = backend.encode(content, add_special_tokens=False).ids
    if ids != [i] or backend.decode([i], skip_special_tokens=False).strip() != content:
        raise InvalidInput(
            f"{label} is {content!r}, which the tokenizer splits into ids {ids}; choose another id"
        )


def fit_model(model: Any, size: int, *, seed: int = 0) -> int:
    """Grow a model's embeddings and output head to at least `size` rows; return their number.

    Never shrinks. New rows are the mean of the existing ones plus a little noise drawn from
    `seed`; existing rows, tied weights and the global random state stay as they are.
    """
    import torch

    old = int(model.get_input_embeddings().weight.shape[0])
    if size <= old:
        return old
    device = model.get_input_embeddings().weight.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.resize_token_embeddings(size, mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    _fill_new_rows(model.get_input_embeddings().weight, old, generator)
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        _fill_new_rows(head.weight, old, generator)
    if getattr(head, "bias", None) is not None:
        with torch.no_grad():
            head.bias[old:] = head.bias[:old].mean()
    return size


def _fill_new_rows(weight: Any, old: int, generator: Any) -> None:
    import torch

    with torch.no_grad():
        known = weight[:old].float()
        noise = torch.randn(weight[old:].shape, generator=generator).to(weight.device)
        weight[old:] = (known.mean(0) + NOISE * known.std() * noise).to(weight.dtype)
