"""Files that are there whole or not at all, and JSON that is one or is refused."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":
    import fcntl

LOCKS = sys.platform != "win32"
"""Whether a scratch file is locked while it is written, which tells a living writer's from a dead
one's. Where a file that is open cannot be renamed, none is, and none is swept."""


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
    it was; what a crash leaves beside it, the next writer of `path` takes away. An `OSError`, which
    names a file, is the caller's to tell."""
    final = Path(os.path.realpath(path))
    _sweep(final)
    try:
        scratch, file = _begin(final)
        try:
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if LOCKS:
                    scratch.replace(final)  # while it is locked, lest it be swept in between
            if not LOCKS:
                scratch.replace(final)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        error.filename = error.filename or str(final)  # a full disk names none
        raise


def _stem(final: Path) -> str:
    return f".{final.name[:100]}."


def _begin(final: Path) -> tuple[Path, IO[bytes]]:
    """A new scratch file of `final`, open and locked."""
    while True:
        scratch = final.with_name(f"{_stem(final)}{secrets.token_hex(4)}.tmp")
        file = scratch.open("xb")
        if not LOCKS or _is_locked(file, scratch):
            return scratch, file
        file.close()


def _is_locked(file: IO[bytes], scratch: Path) -> bool:
    """Locks it. False if it was swept before that. A file system without locks sweeps nothing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return True
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), scratch.stat())
    return False


def _sweep(final: Path) -> None:
    """Takes away scratch files of `final` whose writers died: nobody holds their locks. What
    cannot be read or taken away stays, and is no fault of the one who writes now."""
    if not LOCKS:
        return
    form = re.compile(re.escape(_stem(final)) + r"[0-9a-f]{8}\.tmp")
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(final.parent) if form.fullmatch(name)]
    for left in map(final.with_name, names):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
