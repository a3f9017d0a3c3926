"""Append-only files of keyed rows: what was paid for once is never lost and never done again."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self

from filelock import FileLock, Timeout

from stretto.data.rows import R, read_rows
from stretto.errors import InvalidInput, StrettoError
from stretto.files import parse_json


class Store(Generic[R]):
    """Rows of one kind in a JSONL file, in the order they came, one of a key.

    A row is on disk, whole, when `add` returns. A torn last row, left by a kill, is cut off when
    the file is opened; a file that is not ours is refused and left as it is. One process at a
    time: a second one raises `InvalidInput`.
    """

    def __init__(self, path: Path, kind: type[R]) -> None:
        self.path = path
        self._lock = FileLock(f"{path}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise InvalidInput(
                f"{path} is being written by another process; wait for it or name another file"
            ) from None
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            _mend_end(path, kind)
            rows = read_rows(path, kind) if path.exists() else []
            self.rows = {row.key: row for row in rows}
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            self._lock.release()
            raise _unwritable(path, error) from None
        except BaseException:
            self._lock.release()
            raise

    def next_number(self, key: str) -> int:
        """The first number n from 1 on for which the key KEY/n is free."""
        return next(n for n in itertools.count(1) if f"{key}/{n}" not in self)

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, *rows: R) -> None:
        """Appends rows in one write, so that a kill keeps rows that belong together together; or
        leaves the file as it was and raises: `InvalidInput` for a key that is there already,
        `StrettoError` where the disk takes no more."""
        keys = {row.key: row for row in rows}
        taken = next((key for key in keys if key in self.rows), None)
        if taken is not None or len(keys) < len(rows):
            raise InvalidInput(f"{self.path} has a row {taken or rows[0].key} already")
        line = b"".join(line_of(row.model_dump(exclude_none=True)) for row in keys.values())
        number = self._file.fileno()
        size = os.fstat(number).st_size
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(number)
        except OSError as error:
            os.ftruncate(number, size)
            raise StrettoError(
                f"cannot write to {self.path}: {error.strerror}; make room there and run it again"
            ) from None
        self.rows |= keys

    def close(self) -> None:
        self._file.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _unwritable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(f"{path} cannot be written: {error.strerror}; name another file")


def line_of(value: Any) -> bytes:
    """A line of a JSONL file; lone surrogates stay escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _mend_end(path: Path, kind: type[R]) -> None:
    """Cuts off the beginning of a row at the end of a file, and ends a whole one that lacks only
    its line end. Anything else there is not ours: reading it tells."""
    if not path.exists():
        return
    first = next(iter(kind.model_fields))
    beginning = f'{{"{first}": '.encode()
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        rest = data[whole:].rstrip(b"\0")
        if whole == len(data):
            return
        if _is_row(rest, kind):
            file.write(b"\n")
        elif not _is_json(rest) and rest[: len(beginning)] == beginning[: len(rest)]:
            file.truncate(whole)


def _is_row(line: bytes, kind: type[R]) -> bool:
    try:
        kind.model_validate(parse_json(line))
    except ValueError:
        return False
    return True


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True
