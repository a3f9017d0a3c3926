"""Measured cells kept in a file as they come, so that a killed benchmark goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.bench.pairs import Report
from stretto.files import parse_json, write_atomically

FILE = "cells.jsonl"
Cell = dict[str, Any]
"""`row`, and the raw `records` behind it; any JSON."""


class Journal:
    """The cells of one benchmark under way in the folder `out`; without one, nothing is kept.

    The first line is the `heading`, JSON of all that decides what is measured (settings, model,
    revision). Cells under another heading are not of this benchmark and are let go of; so are all
    cells if the `revision` does not say what code measured them.
    """

    def __init__(
        self, out: Path | None, heading: dict[str, Any], report: Report, *, revision: str | None
    ) -> None:
        self._path = None if out is None else out / FILE
        self._report = report
        self._cells: dict[str, Cell] = {}
        if self._path is None:
            return
        heading = json.loads(json.dumps(heading))
        lines = _whole_lines(self._path)
        if not is_exact(revision):
            report(
                f"the revision is {revision or 'unknown'}, so measured cells are neither taken "
                f"from {self._path} nor gone on from later; a clean checkout's are"
            )
        elif lines and lines[0] == heading:
            self._cells = {line["key"]: line["cell"] for line in lines[1:]}
            report(f"going on from {len(self._cells)} measured cells in {self._path}")
        elif lines:
            report(f"{self._path} is of other settings or another revision; measuring anew")
        kept = [heading, *({"key": k, "cell": c} for k, c in self._cells.items())]
        write_atomically(self._path, b"".join(map(_line, kept)))

    def cell(self, key: str, measure: Callable[[], Cell]) -> Cell:
        """The cell of that key, measured now unless it is there."""
        if key not in self._cells:
            self._cells[key] = cell = measure()
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(_line({"key": key, "cell": cell}))
                    file.flush()
                    os.fsync(file.fileno())
        return self._cells[key]

    def __contains__(self, key: str) -> bool:
        return key in self._cells

    def finish(self) -> None:
        """The results are saved: the same command now measures anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def is_exact(revision: str | None) -> bool:
    """Whether a revision names one state of the code: known, and not changed since."""
    return revision is not None and not revision.endswith("-dirty")


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _whole_lines(path: Path) -> list[Any]:
    """The JSON lines of a file, without a torn last one; empty if there is none, or rubbish."""
    try:
        data = path.read_bytes()
        return [parse_json(line) for line in data[: data.rfind(b"\n") + 1].split(b"\n") if line]
    except (OSError, ValueError):
        return []
