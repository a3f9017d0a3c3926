"""Puts a trained model among those that come with the package: its files, a card, checksums."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from stretto.errors import InvalidInput
from stretto.files import write_atomically
from stretto.models.manifest import MANIFEST, write_manifest

CARD = "README.md"


def ship(model: Path, folder: Path, card: str, *, source: Mapping[str, str]) -> None:
    """Makes `folder`, anew if it is there, whole or not at all: the files of `model` as they are,
    `card`, and a manifest with the size and hash of each. `source`: what the model came from, for
    the manifest. Raises `InvalidInput` if `model` is no folder of files alone."""
    files = sorted(model.iterdir()) if model.is_dir() else []
    if not files or not all(path.is_file() for path in files):
        raise InvalidInput(f"{model} is not a folder of a model's files; train the model first")
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        for path in files:
            if path.name not in (CARD, MANIFEST):
                shutil.copyfile(path, scratch / path.name)
        write_atomically(scratch / CARD, card.encode())
        write_manifest(scratch, name=folder.name, source=source)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
