"""What the command line reads: prompts and annotated texts, from arguments, files or stdin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from stretto.errors import InvalidInput

STDIN = "-"
MAX_PROMPT_BYTES = 16 << 20
"""More than any supported model's context holds; a device or a wrong file ends here."""


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, `file`, or standard input (`-`, or nothing given and a pipe).

    One line end at the end of a file or of stdin is not part of the prompt. Raises `InvalidInput`
    for a prompt that is missing, empty, given twice, unreadable, too large or not UTF-8 text.
    """
    if prompt is not None and file is not None:
        raise InvalidInput(f"both a prompt and --file {str(file)!a} are given; leave one out")
    if file is not None:
        where, text = f"--file {str(file)!a}", _read_prompt(str(file))
    elif prompt is not None and prompt != STDIN:
        where, text = "the prompt", prompt
        check_utf8(where, prompt)
    elif prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InvalidInput("no prompt; give it as an argument, with --file PATH, or on stdin")
    else:
        where, text = "standard input", _read_prompt(STDIN)
    if not text.strip():
        raise InvalidInput(f"{where} is empty; give some text to answer")
    return text


def check_utf8(where: str, text: str) -> None:
    """Raises `InvalidInput` for an argument that was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{where} {text[:40]!a} is not UTF-8; give it as UTF-8") from None


def read_text(file: str, max_bytes: int) -> str:
    """The text of a file, or of standard input (`-`), line ends untouched.

    Raises `InvalidInput` if it cannot be read, is longer than `max_bytes` or is not UTF-8.
    """
    where = "standard input" if file == STDIN else ascii(file)
    try:
        data = _read_bytes(file, max_bytes)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidInput(f"cannot read {where} ({reason}); give a text file, or -") from None
    if len(data) > max_bytes:
        raise InvalidInput(f"{where} is larger than {max_bytes:,} bytes; shorten it")
    try:
        return data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{where} is not UTF-8 at byte {error.start}; convert it to UTF-8 first"
        ) from None


def _read_prompt(file: str) -> str:
    text = read_text(file, MAX_PROMPT_BYTES)
    if (at := text.find("\0")) >= 0:
        where = "standard input" if file == STDIN else ascii(file)
        raise InvalidInput(f"{where} is binary (a NUL at character {at}); give UTF-8 text")
    return text.removesuffix("\n").removesuffix("\r")


def _read_bytes(file: str, max_bytes: int) -> bytes:
    """The file's bytes; of one longer than `max_bytes`, only as many as show that."""
    limit = max_bytes + 1
    if file == STDIN:
        if sys.stdin is None:
            return b""
        stdin: BinaryIO = sys.stdin.buffer
        return stdin.read(limit)
    with Path(file).expanduser().open("rb") as opened:
        return opened.read(limit)
