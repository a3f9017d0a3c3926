"""`manifest.json`: what a converted model was made from, and the size and hash of its files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.errors import ModelUnavailable
from stretto.files import parse_json

MANIFEST = "manifest.json"
FORMAT = 1


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, *, name: str, source: Mapping[str, str]) -> None:
    """Describe every file in `folder`, which must be complete and flat, in its manifest."""
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    content = {"format": FORMAT, "name": name, "source": dict(source), "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path, *, remedy: str) -> dict[str, Any]:
    """Return the manifest of `folder`; raises `ModelUnavailable`, ending in `remedy`."""
    path = folder / MANIFEST
    try:
        content = parse_json(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT}")
        files = content["files"].items()
        if not files or not all(_is_entry(name, known) for name, known in files):
            raise ValueError("its files are not names with sizes and hashes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnavailable(f"{path} is missing or damaged ({error}); {remedy}") from error
    return dict(content)


def _is_entry(name: str, known: Any) -> bool:
    return (
        Path(name).name == name
        and isinstance(known, dict)
        and isinstance(known.get("size_bytes"), int)
        and isinstance(known.get("sha256"), str)
    )


def verify_manifest(folder: Path, *, pull_name: str, hashes: bool = True) -> None:
    """Compare the files of `folder` with its manifest: sizes always, SHA-256 if `hashes`.

    Raises `ModelUnavailable` for the first file that differs; its way out is to pull `pull_name`.
    """
    remedy = f"`stretto model pull {pull_name}` rebuilds it"
    for name, known in read_manifest(folder, remedy=remedy)["files"].items():
        path = folder / name
        size_bytes = path.stat().st_size if path.is_file() else None
        if size_bytes != known["size_bytes"]:
            found = "missing" if size_bytes is None else f"{size_bytes:,} bytes long"
            raise ModelUnavailable(
                f"{path} is {found}, expected {known['size_bytes']:,} bytes; {remedy}"
            )
        if hashes and (digest := sha256_of(path)) != known["sha256"]:
            raise ModelUnavailable(
                f"{path} is corrupt: its sha256 is {digest}, expected {known['sha256']}; {remedy}"
            )


def is_intact(folder: Path) -> bool:
    """Tell whether `folder` is there and agrees with its manifest, hashes included."""
    try:
        verify_manifest(folder, pull_name="")
    except ModelUnavailable:
        return False
    return True
