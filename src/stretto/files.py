"""Files that are there whole or not at all, and JSON that is one or is refused."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def parse_json(data: bytes) -> Any:
    """The JSON value in `data`. Raises `ValueError` if it is none, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def beside(path: Path, ending: str) -> Path:
    """The file of this ending that belongs to an output: of answers.jsonl answers.run.json.

    No two outputs share one: any other ending is kept, so of 0.7 it is 0.7-run.json.
    """
    stem = path.name.removesuffix(".jsonl")
    return path.with_name(f"{path.name}-{ending}" if stem == path.name else f"{stem}.{ending}")


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a scratch file beside `path` and renames it. A crash or a full disk leaves `path` as
    it was; an `OSError`, which names a file, is the caller's to tell."""
    final = Path(os.path.realpath(path))
    scratch = final.with_name(f".{final.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with scratch.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(final)
    except OSError as error:
        error.filename = error.filename or str(final)  # a full disk names none
        raise
    finally:
        scratch.unlink(missing_ok=True)
