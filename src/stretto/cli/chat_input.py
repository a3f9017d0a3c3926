"""What is typed or piped into a chat, message by message."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import BinaryIO

from stretto.cli.inputs import MAX_PROMPT_BYTES, check_utf8
from stretto.errors import InvalidInput

PROMPT, CONTINUED = "> ", ". "
GOES_ON = "\\"
"""At the end of a line: the message goes on in the next one."""


class Messages:
    """Messages from standard input: a line each, or several that end with a backslash."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._num_lines = 0
        if self.is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` line editing and a history

    def read(self) -> str | None:
        """The next message; None at the end. Raises `InvalidInput` for a line that is no text, and
        goes on behind it when called again."""
        lines: list[str] = []
        while (line := self._line(CONTINUED if lines else PROMPT)) is not None:
            if not line.endswith(GOES_ON):
                return "\n".join([*lines, line])
            lines.append(line.removesuffix(GOES_ON))
        return "\n".join(lines) if lines else None

    def _line(self, prompt: str) -> str | None:
        if not self.is_terminal:
            return self._piped()
        if not sys.stdout.isatty():  # which `input` would write the prompt to
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            line = input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)  # what was typed stays in its line
            raise
        except UnicodeDecodeError:
            raise InvalidInput("the message is not UTF-8; set the terminal to UTF-8") from None
        check_utf8("the message", line)
        return line

    def _piped(self) -> str | None:
        if sys.stdin is None:
            return None
        stdin: BinaryIO = sys.stdin.buffer
        data = stdin.readline(MAX_PROMPT_BYTES + 1)
        if not data:
            return None
        self._num_lines += 1
        if is_long := len(data) > MAX_PROMPT_BYTES:
            while data and not data.endswith(b"\n"):
                data = stdin.readline(MAX_PROMPT_BYTES)
        where = f"line {self._num_lines} of standard input"
        if is_long:
            raise InvalidInput(f"{where} is larger than {MAX_PROMPT_BYTES:,} bytes; shorten it")
        if b"\0" in data:
            raise InvalidInput(f"{where} is binary (it has a NUL); give UTF-8 text")
        try:
            return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{where} is not UTF-8 at byte {error.start}; convert it to UTF-8 first"
            ) from None
