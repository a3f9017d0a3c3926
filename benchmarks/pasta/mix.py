"""Chooses what a model is taught: all answers that have annotations, and as many that have none.

    python benchmarks/pasta/mix.py annotated.jsonl --out mix.jsonl

Most answers of a small model are one short paragraph. Taught on all of them, it would hardly ever
promise; taught on annotated ones alone, it would not learn when not to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stretto.data.rows import Annotated, read_rows
from stretto.data.store import line_of
from stretto.files import write_atomically

LEAST = 8
"""Plain rows that are always kept: a miniature may have no annotated one."""


def mixed(rows: list[Annotated], share: float) -> list[Annotated]:
    """The annotated rows and, by order of their hashes, `share` times as many of the others."""
    marked = [row for row in rows if row.annotated != row.response]
    plain = sorted((row for row in rows if row.annotated == row.response), key=lambda r: r.key)
    num_plain = max(LEAST, round(share * len(marked)))
    return sorted([*marked, *plain[:num_plain]], key=lambda r: r.key)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plain", type=float, default=1.0, help="plain rows per annotated one")
    arguments = parser.parse_args()
    rows = mixed(read_rows(arguments.rows, Annotated), arguments.plain)
    lines = [line_of(row.model_dump(exclude_none=True)) for row in rows]
    write_atomically(arguments.out, b"".join(lines))
    num_marked = sum(row.annotated != row.response for row in rows)
    print(f"{len(rows)} rows, {num_marked} with annotations, in {arguments.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
