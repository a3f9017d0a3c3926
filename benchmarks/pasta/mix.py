"""Chooses what a model is taught: answers that have annotations, and some that have none.

    python benchmarks/pasta/mix.py annotated.jsonl --rows 1300 --out mix.jsonl

Taught on all of a small model's answers, it would seldom promise; taught on annotated ones alone,
it would not learn when not to. Rows that promise once gain little, and those that promise the same
twice teach a model to repeat itself: both are left out. The same number of rows for each annotator
keeps their training equal.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

from stretto.bench.experiment import told
from stretto.data.rows import Annotated, read_rows
from stretto.data.store import line_of
from stretto.errors import InvalidInput
from stretto.files import write_atomically

TOPIC = re.compile(r'<promise topic="([^"]*)"')
LEAST_PROMISES = 2
LEAST = 8
"""Plain rows that are always kept: a miniature may have no annotated one."""


def teaches(row: Annotated) -> bool:
    """Whether a row makes two promises or more, of different topics. Fork tokens have no topic."""
    topics = [topic.lower() for topic in TOPIC.findall(row.annotated)]
    return len(set(topics)) == len(topics) >= LEAST_PROMISES or "<fork/>" in row.annotated


def mixed(rows: list[Annotated], num_rows: int, share: float) -> list[Annotated]:
    """At most `num_rows`: annotated ones and `share` times as many others, each those of lowest
    hash. Raises `InvalidInput` for numbers that say nothing."""
    if num_rows < 1 or not 0 <= share < math.inf:
        raise InvalidInput(
            f"{num_rows} rows, {share:g} plain ones per annotated one: ask for at least one row, "
            "and a share from 0 on"
        )
    by_hash = sorted(rows, key=lambda row: row.key)
    marked = [row for row in by_hash if teaches(row)]
    plain = [row for row in by_hash if row.annotated == row.response]
    marked = marked[: round(num_rows / (1 + share))]
    return sorted([*marked, *plain[: max(LEAST, round(share * len(marked)))]], key=lambda r: r.key)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="at most so many")
    parser.add_argument("--plain", type=float, default=0.3, help="plain rows per annotated one")
    arguments = parser.parse_args()
    rows = mixed(read_rows(arguments.file, Annotated), arguments.rows, arguments.plain)
    lines = [line_of(row.model_dump(exclude_none=True)) for row in rows]
    write_atomically(arguments.out, b"".join(lines))
    num_marked = sum(row.annotated != row.response for row in rows)
    print(f"{len(rows)} rows, {num_marked} with annotations, in {arguments.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
