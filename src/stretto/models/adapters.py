"""Adapter folders: a LoRA and the rows of new tokens, of a base (`merging` puts the two together).

A folder has PEFT's `adapter_config.json` and `adapter_model.safetensors`, our `stretto.json`, and
`base.json`, which says of which weights it is an adapter. Describing one needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import InvalidInput, ModelUnavailable, Unsupported
from stretto.files import write_atomically
from stretto.models.fingerprint import weights_fingerprint
from stretto.models.folder import ModelFacts
from stretto.models.weights import (
    ADAPTER_CONFIG,
    is_adapter,
    read_json_object,
)
from stretto.tokens.card import CARD, ModelCard

if TYPE_CHECKING:
    from stretto.models.registry import ResolvedModel

BASE = "base.json"
FORMAT = 1

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
        return cls(name, weights_fingerprint(path), facts.vocab_size, facts.num_parameters)

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
    if known is not None and (found := weights_fingerprint(base.path)) != known.fingerprint:
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
