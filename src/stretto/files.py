"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


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
