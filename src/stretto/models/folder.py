"""A model folder described and checked without torch."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import ModelUnavailable, Unsupported
from stretto.models.weights import (
    DTYPES,
    StoredTensor,
    read_header,
    read_json_object,
    weight_files,
)

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")  # as folders and as GGUF files
FOLDER_MODEL_TYPES = (*SUPPORTED_MODEL_TYPES, "gemma", "gemma2", "gemma3_text")
CARD = "stretto.json"
LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class ModelFacts:
    """What a model folder says of itself. Tied weights count once; `eos_ids` may be empty."""

    architecture: str
    model_type: str
    num_parameters: int
    dtype: str
    vocab_size: int
    context_length: int
    num_layers: int
    size_bytes: int
    dialect: str
    eos_ids: tuple[int, ...]


def inspect_folder(folder: Path) -> ModelFacts:
    """Check that `folder` holds a model that can be loaded, and describe it.

    Raises `ModelUnavailable` for missing or damaged files and `Unsupported` for a kind of model
    that is not run. Reads headers only: damage inside tensor data goes unseen here.
    """
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(
            f"{folder} has no config.json; give the folder that `save_pretrained` wrote"
        )
    config = read_json_object(folder / "config.json")
    _check_kind(folder, config)
    files = weight_files(folder)
    _check_tokenizer(folder)
    tensors = {name: tensor for path in files for name, tensor in read_header(path).items()}
    num_layers = _count(folder, config, "num_hidden_layers")
    _check_layers(folder, num_layers, tensors)
    if config.get("tie_word_embeddings") is True:
        tensors.pop("lm_head.weight", None)
    return ModelFacts(
        architecture=_architecture(config),
        model_type=config["model_type"],
        num_parameters=sum(tensor.num_elements for tensor in tensors.values()),
        dtype=_main_dtype(folder, tensors),
        vocab_size=_count(folder, config, "vocab_size"),
        context_length=_count(folder, config, "max_position_embeddings"),
        num_layers=num_layers,
        size_bytes=sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        dialect=_dialect(folder),
        eos_ids=_eos_ids(folder, config),
    )


def _check_kind(folder: Path, config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in FOLDER_MODEL_TYPES:
        known = ", ".join(FOLDER_MODEL_TYPES)
        raise Unsupported(f"{folder} has model_type {model_type!r}; supported: {known}")
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise Unsupported(f"{folder} is quantised ({method}); use the model's unquantised folder")


def _check_tokenizer(folder: Path) -> None:
    whole = (folder / "tokenizer.json").is_file()
    parts = all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))
    if not whole and not parts:
        raise ModelUnavailable(
            f"{folder} has no tokenizer.json; save its tokenizer there with `save_pretrained`"
        )


def _check_layers(folder: Path, num_layers: int, tensors: dict[str, StoredTensor]) -> None:
    """Refuse layers that are not stored: transformers would build each of them before it looks."""
    stored = {match[1] for name in tensors if (match := LAYER.search(name))}
    if num_layers > len(stored):
        raise ModelUnavailable(
            f"{folder} does not fit its config.json: it has {len(stored)} of {num_layers} layers;"
            " copy or download the model again"
        )


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else str(config["model_type"])


def _main_dtype(folder: Path, tensors: dict[str, StoredTensor]) -> str:
    """Return the dtype that most parameters have."""
    shares: Counter[str] = Counter()
    for tensor in tensors.values():
        shares[tensor.dtype] += tensor.num_elements
    if not shares:
        raise ModelUnavailable(f"{folder} has weight files without tensors; download them again")
    main = shares.most_common(1)[0][0]
    if main not in DTYPES:
        raise Unsupported(f"{folder} stores weights as {main}; supported: {', '.join(DTYPES)}")
    return DTYPES[main]


def _count(folder: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelUnavailable(
            f"{folder / 'config.json'} has {key} = {value!r}, expected a positive whole number"
        )
    return value


def _dialect(folder: Path) -> str:
    card = folder / CARD
    return str(read_json_object(card).get("dialect", "plain")) if card.is_file() else "plain"


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text: those for generation if given, else the config's."""
    generation = folder / "generation_config.json"
    named = read_json_object(generation).get("eos_token_id") if generation.is_file() else None
    if named is None:
        named = config.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(each, int) for each in ids):
        raise ModelUnavailable(f"{folder} has eos_token_id {named!r}, expected whole numbers")
    return tuple(ids)
