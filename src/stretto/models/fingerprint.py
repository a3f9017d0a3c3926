"""Which model a folder holds: `fingerprint` of all that decides what it answers, and
`weights_fingerprint` of its weights alone, for adapters, which go with other tokenizers and cards.

Neither needs torch, and both are quick for weights of any size.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from stretto.files import parse_json
from stretto.models.weights import read_header, weight_files

DECIDING = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt")
"""Endings of files that decide what a model answers: weights, settings, card, tokenizer and chat
template. Notes and pictures beside them do not."""
NOTES = ("license.txt", "notice.txt", "readme.txt")
NUM_BLOCKS = 64
BLOCK_BYTES = 1 << 16
"""Of each file so many evenly spaced blocks are hashed: one that was trained differs in nearly all
of them."""
PROBE_BYTES = 1024
"""Of each tensor, what `weights_fingerprint` reads."""


def fingerprint(folder: Path) -> str:
    """16 hex digits that tell a model's folder from another: of the names, sizes and contents of
    the files that decide what it answers, of large ones a sample of blocks."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if _decides(path)):
        size = path.stat().st_size
        digest.update(f"{path.name}/{size}/".encode())
        with path.open("rb") as file:
            step = max(BLOCK_BYTES, size // NUM_BLOCKS)
            for at in range(0, size, step):
                file.seek(at)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _decides(path: Path) -> bool:
    name = path.name.lower()
    is_known = name.endswith(DECIDING) and name not in NOTES and name[0] != "."
    return is_known and path.is_file()


def weights_fingerprint(folder: Path) -> str:
    """Names a model's weights: a hash of each tensor's name, type, shape and first bytes, the same
    however the tensors lie in files. Raises `ModelUnavailable` for what is no model's folder."""
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
