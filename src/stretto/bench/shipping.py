"""Puts a trained model among those that come with the package: its files, a card, checksums."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.errors import InvalidInput
from stretto.files import write_atomically
from stretto.models.manifest import MANIFEST, write_manifest
from stretto.models.shipped import FOLDER

CARD = "README.md"


def asked(
    argv: Sequence[str] | None, about: str | None, results: Path, name: str
) -> tuple[Path, Path]:
    """The folder of results and the one to make, as a script's options have them."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=kind)
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--out", type=Path, default=FOLDER / name)
    given = parser.parse_args(argv)
    return given.results, given.out


def ship(
    model: Path, folder: Path, card: str, *, source: Mapping[str, str],
    names: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Makes `folder`, anew if it is there, whole or not at all: the files of `model` as they are,
    or those of these names, `card`, and a manifest with the size and hash of each. `source`: what
    the model came from, for the manifest. Raises `InvalidInput` if `model` is no folder of files
    alone, or lacks one that is named."""
    found = sorted(model.iterdir()) if model.is_dir() else []
    files = found if names is None else [model / name for name in names]
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
