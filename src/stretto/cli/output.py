"""What the command line writes: data on stdout, one-line messages on stderr, whole files."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto.errors import InvalidInput, StrettoError
from stretto.files import write_atomically


def write_text(text: str) -> None:
    """Writes to stdout at once, as UTF-8. What stdout refuses is left for `main` to tell."""
    write_bytes(text.encode("utf-8", errors="replace"))


def write_json(value: Any) -> None:
    """Writes one JSON value on one line of stdout."""
    write_bytes(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A value as one line of UTF-8 JSON; lone surrogates (odd file names) stay escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def write_bytes(data: bytes) -> None:
    if sys.stdout is None:
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def say(message: str) -> None:
    """One line for people, on stderr."""
    if sys.stderr is not None:
        print(one_line(message), file=sys.stderr, flush=True)


def one_line(message: str) -> str:
    """A message without line breaks and control characters."""
    return escaped(" ".join(message.split()))


def escaped(text: str) -> str:
    """Text that cannot steer a terminal: control characters but line feed and tab as escapes."""
    if text.isprintable():
        return text
    return "".join(ascii(c)[1:-1] if _steers(c) else c for c in text)


def _steers(c: str) -> bool:
    return c not in "\n\t" and (c < " " or "\x7f" <= c <= "\x9f")


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
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed. The first press is only noted, the next one kills.

    Where Ctrl-C is ignored (background jobs) or belongs to another Python thread, nothing changes.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: False
        return
    presses: list[int] = []

    def note(number: int, _: object) -> None:
        presses.append(number)
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
