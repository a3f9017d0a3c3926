"""Instruction data as a folder of JSONL files: rows and fields, read with distrust."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.data.rows import read_lines
from stretto.errors import InvalidInput


def rows_in(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of all files by name, each with its place for messages. Raises `InvalidInput` where
    there is no file, and as `read_lines`."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise InvalidInput(f"no JSONL files in {folder}; name the folder of instruction data")
    for path in paths:
        for number, row in read_lines(path):
            yield f"{path}:{number}", row


def text_in(place: str, row: dict[str, Any], name: str) -> str | None:
    """The text of a field; None where there is none. Raises `InvalidInput` for what is no text."""
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(
            f"{place} has a {type(value).__name__} in field {name}, which is no text; mend the line"
        )
    return value
