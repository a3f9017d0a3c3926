"""Safetensors files read by their headers alone: no torch, no tensor data."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import ModelUnavailable
from stretto.files import parse_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds an adapter, and no model of its own."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, one or the shards of its index.

    Those of an adapter's folder are the adapter's own.

    Raises `ModelUnavailable` if there are none, or a shard is missing. Pickled weights are never
    an alternative: opening one runs whatever code it holds.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _shards(folder)
    if is_adapter(folder) and (folder / ADAPTER_WEIGHTS).is_file():
        return [folder / ADAPTER_WEIGHTS]
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelUnavailable(
            f"{folder} holds a LoRA adapter, not a model; merge it into its base model first"
        )
    pickled = next((path.name for path in sorted(folder.glob("*.bin"))), None)
    if pickled is not None:
        raise ModelUnavailable(
            f"{folder} has only pickled weights ({pickled}), which are not opened because they can"
            " run code; convert them to safetensors"
        )
    raise ModelUnavailable(f"{folder} has no {WEIGHTS}; copy the model's weights there")


def _shards(folder: Path) -> list[Path]:
    index = read_json_object(folder / INDEX)
    named = index.get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ModelUnavailable(f"{folder / INDEX} has no weight_map; download it again")
    shards = [folder / Path(name).name for name in sorted(set(map(str, named.values())))]
    for shard in shards:
        if not shard.is_file():
            raise ModelUnavailable(f"{shard} is missing, one of {len(shards)}; download it again")
    return shards


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors named in a safetensors header; checks that the file is of full length."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        if len(length) < 8:
            raise _damaged(path, f"{size_bytes} bytes is no safetensors file")
        (header_bytes,) = struct.unpack("<Q", length)
        if header_bytes > min(MAX_HEADER_BYTES, size_bytes - 8):
            raise _damaged(path, f"its header claims {header_bytes:,} of {size_bytes:,} bytes")
        header = file.read(header_bytes)
    try:
        entries = parse_json(header)
        entries.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
            for name, entry in entries.items()
        }
        data_bytes = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, "its header is not readable") from error
    expected_bytes = 8 + header_bytes + data_bytes
    if size_bytes != expected_bytes:
        raise _damaged(path, f"{size_bytes:,} bytes, expected {expected_bytes:,}")
    return tensors


def _damaged(path: Path, reason: str) -> ModelUnavailable:
    return ModelUnavailable(f"{path} is damaged: {reason}; copy or download it again")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raises `ModelUnavailable` if it holds anything else."""
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelUnavailable(f"{path} is missing; copy or download it") from error
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} is not readable JSON ({error}); replace it") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path} holds no JSON object; replace it")
    return content
