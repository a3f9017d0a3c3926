"""Adapter folders: a LoRA and the rows of new tokens, merged onto their base model when loaded.

A folder has PEFT's `adapter_config.json` and `adapter_model.safetensors`, our `stretto.json`, and
`base.json`, which says of which weights it is an adapter. Describing one needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import InvalidInput, ModelUnavailable, Unsupported
from stretto.files import parse_json, write_atomically
from stretto.models.folder import ModelFacts
from stretto.models.weights import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    is_adapter,
    read_header,
    read_json_object,
    weight_files,
)
from stretto.tokens.card import CARD, ModelCard

if TYPE_CHECKING:
    from stretto.models.registry import ResolvedModel

BASE = "base.json"
FORMAT = 1
PROBE_BYTES = 1024
"""Of each tensor, what the fingerprint of a base reads."""

PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
ROWS = ".token_adapter.trainable_tokens_delta"
UNSUPPORTED = (
    "alpha_pattern", "alora_invocation_tokens", "corda_config", "fan_in_fan_out",
    "layer_replication", "lora_bias", "modules_to_save", "rank_pattern", "target_parameters",
    "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
"""Settings of PEFT under which an adapter is more than the product of two matrices."""


@dataclass(frozen=True)
class Base:
    """What `base.json` says: the base as it was named, its fingerprint, its rows and weights."""

    name: str
    fingerprint: str
    vocab_size: int
    num_parameters: int

    @classmethod
    def of(cls, name: str, path: Path, facts: ModelFacts) -> Base:
        return cls(name, fingerprint(path), facts.vocab_size, facts.num_parameters)

    def save(self, folder: Path) -> None:
        content = {"format": FORMAT, **self.__dict__}
        write_atomically(folder / BASE, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Base | None:
        """That of an adapter's folder; None if another program wrote it, and it has none."""
        if not (folder / BASE).is_file():
            return None
        content = read_json_object(folder / BASE)
        try:
            if content.pop("format") != FORMAT:
                raise ValueError("its format is another")
            return cls(**content)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelUnavailable(
                f"{folder / BASE} is damaged ({error}); copy the adapter again"
            ) from None


def fingerprint(folder: Path) -> str:
    """Names a model's weights: a hash of each tensor's name, type, shape and first bytes.

    The same however the tensors lie in files, and quick for weights of any size.
    """
    parts: dict[str, bytes] = {}
    for path in weight_files(folder):
        read_header(path)  # raises for a damaged file
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + length + start)
                head = file.read(min(PROBE_BYTES, end - start))
                parts[name] = f"{name} {entry['dtype']} {entry['shape']} ".encode() + head
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(hashlib.sha256(parts[name]).digest())
    return digest.hexdigest()


# -- describing ------------------------------------------------------------------------------------


def base_name(folder: Path) -> str:
    """The base that an adapter names: a model's name, or a folder, of which a relative path may
    also begin at the adapter's own folder."""
    known = Base.load(folder)
    name = known.name if known else _config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ModelUnavailable(
            f"{folder / ADAPTER_CONFIG} names no base model; put its name or path there as "
            "base_model_name_or_path"
        )
    beside = folder / name
    return str(beside) if not Path(name).is_absolute() and beside.is_dir() else name


def inspect_adapter(folder: Path, resolve_base: Callable[[str], ResolvedModel]) -> ModelFacts:
    """Checks an adapter's folder and describes the model that it and its base come to.

    `resolve_base` gives the `ResolvedModel` of a name. Raises `ModelUnavailable`, naming both, if
    the base is missing or is not the one of which this is an adapter.
    """
    scaling_of(folder)
    base = base_of(folder, resolve_base)
    card, facts = ModelCard.load(folder), base.facts
    if not (folder / CARD).is_file() and facts.dialect != "plain":
        raise ModelUnavailable(
            f"{folder} has no {CARD}, but its base is of dialect {facts.dialect}; copy the base's"
            f" {CARD} there"
        )
    size = max(facts.vocab_size, max(card.control.values(), default=-1) + 1)
    config = read_json_object(base.path / "config.json") if not is_adapter(base.path) else {}
    tables = 1 if config.get("tie_word_embeddings") is True else 2
    added = (size - facts.vocab_size) * int(config.get("hidden_size", 0)) * tables
    own = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return replace(
        facts,
        vocab_size=size,
        num_parameters=facts.num_parameters + added,
        size_bytes=facts.size_bytes + own,
        dialect=card.dialect,
    )


def base_of(folder: Path, resolve_base: Callable[[str], ResolvedModel]) -> ResolvedModel:
    """The `ResolvedModel` of an adapter's base, which is checked to be the right one."""
    name = base_name(folder)
    _check_chain(folder)
    try:
        base = resolve_base(name)
    except InvalidInput as error:
        raise ModelUnavailable(f"{folder} is an adapter of {name!r}: {error}") from None
    known = Base.load(folder)
    if known is not None and (found := fingerprint(base.path)) != known.fingerprint:
        raise ModelUnavailable(
            f"{folder} is an adapter of {name!r} with fingerprint {known.fingerprint[:16]}, but "
            f"{base.path} has {found[:16]}: other weights; get the base it was trained on"
        )
    return base


def _check_chain(folder: Path) -> None:
    """Raises `ModelUnavailable` if adapters of adapters come back to where they began."""
    seen: set[Path] = set()
    place = folder.resolve()
    while is_adapter(place):
        if place in seen:
            raise ModelUnavailable(f"{folder} is its own base; name the model that it is of")
        seen.add(place)
        place = Path(base_name(place)).expanduser().resolve()


def _config(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / ADAPTER_CONFIG)


def scaling_of(folder: Path) -> float:
    """What the product of a LoRA's matrices is multiplied by.

    Raises `Unsupported`, naming the setting, for an adapter that is more than such products.
    """
    config = _config(folder)
    if config.get("peft_type") != "LORA":
        raise Unsupported(
            f"{folder} is an adapter of type {config.get('peft_type')!r}; supported: LORA"
        )
    odd = [key for key in UNSUPPORTED if config.get(key)]
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if odd:
        raise Unsupported(
            f"{folder} is a LoRA with {odd[0]} = {config[odd[0]]!r}, which is not merged here; "
            "merge it with peft and give the merged folder"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise ModelUnavailable(
            f"{folder / ADAPTER_CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}; copy it again"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


# -- merging ---------------------------------------------------------------------------------------


def load_adapter(
    folder: Path,
    load_base: Callable[[Path], tuple[Any, Any]],
    resolve_base: Callable[[str], ResolvedModel],
) -> tuple[Any, Any]:
    """(model, tokenizer) of an adapter's folder: its base with the adapter merged into it.

    The base's tokenizer gets the control tokens of the card, its model their rows. Products are
    added in float32 and then cast to the model's dtype.
    """
    model, tokenizer = load_base(base_of(folder, resolve_base).path)
    prepare_tokens(model, tokenizer, ModelCard.load(folder), folder)
    merge(model, folder)
    return model, tokenizer


def prepare_tokens(model: Any, tokenizer: Any, card: ModelCard, folder: Path) -> None:
    """Gives a base's tokenizer the control tokens that a card names, and its model rows for them.

    Both are changed in place. Raises `InvalidInput` if the tokens do not get the card's ids.
    """
    from stretto.tokens.control import add_control_tokens, control_content, fit_model

    own = [n for n, text in card.tokens.items() if text == control_content(n)]
    add_control_tokens(tokenizer, sorted(own, key=lambda name: card.control[name]))
    card.check_tokenizer(tokenizer.backend_tokenizer, folder)
    fit_model(model, max(card.control.values(), default=-1) + 1)


def merge(model: Any, folder: Path) -> None:
    """Adds an adapter to a model's weights, in place.

    Raises `ModelUnavailable`, naming the tensor, if it does not fit the model.
    """
    import torch

    tensors, scaling, rank = _read_weights(folder), scaling_of(folder), _config(folder)["r"]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name in sorted(tensors):
            if name.endswith(LORA_A):
                module = name.removeprefix(PREFIX).removesuffix(LORA_A)
                weight = _target(folder, parameters, f"{module}.weight")
                up, down = _pair(folder, tensors, name)
                if down.shape[0] != rank:
                    raise _misfit(folder, name, down.shape, (rank, down.shape[1]))
                if weight.shape != (up.shape[0], down.shape[1]):
                    raise _misfit(folder, name, (up.shape[0], down.shape[1]), weight.shape)
                product = (up.float() @ down.float()).to(weight.device)
                weight.copy_(weight.float() + scaling * product)
            elif name.endswith(ROWS):
                module = name.removeprefix(PREFIX).removesuffix(ROWS)
                weight = _target(folder, parameters, f"{module}.weight")
                _set_rows(folder, name, weight, tensors[name])
            elif name.endswith(LORA_B):
                _pair(folder, tensors, name.removesuffix(LORA_B) + LORA_A)
            else:
                raise Unsupported(f"{folder} has tensor {name!r}, which no LoRA of ours has")


def _read_weights(folder: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_WEIGHTS
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(f"{path} cannot be read ({error}); copy it again") from None


def _pair(folder: Path, tensors: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    other = name.removesuffix(LORA_A) + LORA_B
    if missing := [each for each in (name, other) if each not in tensors]:
        raise ModelUnavailable(f"{folder} lacks {missing[0]!r}; copy the adapter again")
    down, up = tensors[name], tensors[other]
    if down.shape[0] != up.shape[1]:
        raise _misfit(folder, other, up.shape, down.shape)
    return up, down


def _target(folder: Path, parameters: Mapping[str, Any], name: str) -> Any:
    if name not in parameters:
        raise ModelUnavailable(
            f"{folder} has weights for {name!r}, which its base has not; it is of another model"
        )
    return parameters[name]


def _set_rows(folder: Path, name: str, weight: Any, rows: Any) -> None:
    import torch

    listed = _config(folder).get("trainable_token_indices")
    layer = name.removesuffix(ROWS).rsplit(".", 1)[-1]
    ids = listed.get(layer, []) if isinstance(listed, dict) else listed or []
    if not all(isinstance(i, int) and 0 <= i < weight.shape[0] for i in ids):
        raise ModelUnavailable(
            f"{folder / ADAPTER_CONFIG} lists rows of {layer} that the base has not; copy it again"
        )
    if rows.shape != (len(ids), weight.shape[1]):
        raise _misfit(folder, name, rows.shape, (len(ids), weight.shape[1]))
    weight[torch.tensor(ids, device=weight.device)] = rows.to(weight)


def _misfit(folder: Path, name: str, found: Any, expected: Any) -> ModelUnavailable:
    return ModelUnavailable(
        f"{folder} does not fit its base: {name!r} is of shape {tuple(found)}, the base needs "
        f"{tuple(expected)}; it is of another model"
    )
