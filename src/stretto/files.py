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


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a scratch file beside `path` and renames it. A crash or a full disk leaves `path` as
    it was; an `OSError` is the caller's to tell."""
    final = Path(os.path.realpath(path))
    scratch = final.with_name(f".{final.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with scratch.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(final)
    finally:
        scratch.unlink(missing_ok=True)
