"""What the command line writes: data on stdout, one-line messages on stderr, whole files."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stretto.errors import InvalidInput, StrettoError
from stretto.files import write_atomically

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but line feed and tab. (JSON has those below the space escaped anyway.)"""


def open_streams() -> None:
    """Gives streams that came closed to the null device, before a file gets their numbers: what
    libraries write to stderr must not end up in a model."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def forget_empty_size() -> None:
    """COLUMNS=0, as some containers have it, means that the size is not known; rich would print
    nothing at all."""
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "").strip("0"):
            os.environ.pop(name, None)


def write_text(text: str) -> None:
    """Writes to stdout at once, as UTF-8. What stdout refuses is left for `main` to tell."""
    write_bytes(text.encode("utf-8", errors="replace"))


def write_line(text: str) -> None:
    """Writes a line to stdout, names of files in it as they are; on a terminal, without control
    characters."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    write_bytes(os.fsencode((escaped(text) if is_terminal else text) + "\n"))


def write_json(value: Any) -> None:
    """Writes one JSON value on one line of stdout."""
    write_bytes(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A value as one line of UTF-8 JSON; lone surrogates (odd file names) and what steers a
    terminal stay escaped."""
    text = STEERING.sub(lambda c: f"\\u{ord(c[0]):04x}", json.dumps(value, ensure_ascii=False))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def write_bytes(data: bytes) -> None:
    if sys.stdout is None:
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def say(message: str) -> None:
    """One line for people, on stderr. Where that cannot be written, nobody reads it."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(one_line(message), file=sys.stderr, flush=True)


def one_line(message: str) -> str:
    """A message without line breaks and control characters."""
    return escaped(" ".join(message.split()))


def escaped(text: str) -> str:
    """Text that cannot steer a terminal: control characters but line feed and tab as escapes."""
    if text.isprintable():
        return text
    return STEERING.sub(lambda c: ascii(c[0])[1:-1], text)


def is_live(stream: Any) -> bool:
    """Whether a stream is a terminal that can redraw itself."""
    is_terminal = stream is not None and stream.isatty()
    return is_terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextmanager
def passing_line(message: str) -> Iterator[None]:
    """Shows a message on stderr, if that is a terminal, until the block ends."""
    shows = bool(message) and is_live(sys.stderr)
    if shows:
        print(f"{one_line(message)[:60]} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def interruptible(patience: int = 1) -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed. The first `patience` presses are only noted, the next one
    kills.

    Where Ctrl-C is ignored (background jobs) or belongs to another Python thread, nothing changes.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: False
        return
    presses: list[int] = []

    def note(number: int, _: object) -> None:
        presses.append(number)
        if len(presses) >= patience:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


def check_writable(path: Path, option: str) -> None:
    """Raises `InvalidInput`, naming `option`, unless a file can be written at `path`."""
    folder = path.parent
    if os.path.isdir(path):  # False, not an error, for a name too long to be a path
        raise InvalidInput(f"{option} {str(path)!a} is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise InvalidInput(f"{option} {str(path)!a}: there is no folder {str(folder)!a}; make it")
    try:
        target = path if path.exists() and not _is_replaceable(path) else folder
        is_writable = os.access(target, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        raise InvalidInput(f"{option} {str(path)!a} cannot be written; name another file")


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all; a device or pipe is written to as it is."""
    try:
        if path.exists() and not _is_replaceable(path):
            path.write_bytes(data)
            return
        write_atomically(path, data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StrettoError(f"cannot write {str(path)!a}: {reason}; name another file") from None


def _is_replaceable(path: Path) -> bool:
    return stat.S_ISREG(path.stat().st_mode)


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """All rows of a file at once: it is there whole or not at all."""
    from stretto.data.store import line_of

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"{path.parent} cannot be made: {error.strerror}; name another file (--out)"
        ) from None
    write_file(path, b"".join(line_of(row.model_dump(exclude_none=True)) for row in rows))
