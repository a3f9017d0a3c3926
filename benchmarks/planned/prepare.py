"""Training rows in all forms, a vocabulary, and a model with random weights: what all begins with.

    python benchmarks/planned/prepare.py --group few:2-3:10000 --group whole:4-5:10000 \\
        --shape tiny-1m --seed 0 --out data

Writes `vocabulary.json`, the pieces of the problems' texts; `start`, a model without control
tokens; and `GROUP-FORM.jsonl`, a group's problems of task `multipart`, the same in the same order
in each form. What is there already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import KINDS, ROWS

from stretto.data.convert import PlannedForm, pieces_of, planned_text
from stretto.data.store import line_of
from stretto.eval.multipart import NUM_PARTS, Parts, multipart_rows, parse_parts
from stretto.files import write_atomically
from stretto.models.tiny import make_tiny

PIECE = re.compile(r" ?[^\W\d_]+| ?\d| ?[^\w\s]|\s")
"""Words, digits and marks, each with a space before it or without."""
FORMS = {
    "planned": PlannedForm(),
    "no-topics": PlannedForm(topics=False),
    "one-round": PlannedForm(rounds=False),
}


@dataclass(frozen=True)
class Group:
    """Problems to learn from: how many, and of how many parts."""

    name: str
    parts: Parts
    num: int

    @classmethod
    def of(cls, text: str) -> Group:
        """From NAME:PARTS:NUM."""
        name, parts, num = text.split(":")
        return cls(name, parse_parts(parts), int(num))


def vocabulary_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The pieces of prompts and responses, and those that promises need besides: words of topics,
    and digits."""
    texts = (row[name] for row in rows for name in ("prompt", "response"))
    found = {piece for text in texts for piece in PIECE.findall(text)}
    return sorted(found | {"part", "the", *(str(digit) for digit in range(10))})


def rows_in(
    form: str, num: int, seed: int, count: Callable[[str], int], parts: Parts = NUM_PARTS
) -> Iterator[Any]:
    """The problems in a form of `FORMS`, or as pasta rows."""
    planned = form in FORMS
    rows = multipart_rows(
        seed, num, split="train", parts=parts, kinds=KINDS, count_tokens=count, planned=planned
    )
    for row in rows:
        if planned and form != "planned":
            pieces = pieces_of(row["annotated"], count, FORMS[form].unit)
            row["annotated"] = planned_text(pieces, count, FORMS[form])
        yield row


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--group", type=Group.of, action="append", required=True, metavar="NAME:PARTS:NUM"
    )
    made.add_argument("--shape", required=True)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, required=True)
    return made


def main() -> int:
    given = parser().parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    at = given.out / "vocabulary.json"
    if not at.exists():
        symbols = vocabulary_of(
            [
                row
                for own in given.group
                for row in multipart_rows(
                    given.seed, max(own.num, 500), split="train", parts=own.parts, kinds=KINDS
                )
            ]
        )
        write_atomically(at, (json.dumps(symbols, ensure_ascii=False) + "\n").encode())
    plain = make_tiny(given.shape, json.loads(at.read_text()), seed=given.seed)
    if not (given.out / "start").exists():
        plain.save(given.out / "start")

    def count(text: str) -> int:
        return len(plain.vocabulary.encode(text))

    for own in given.group:
        for form in ROWS:
            path = given.out / f"{own.name}-{form}.jsonl"
            if not path.exists():
                rows = rows_in(form, own.num, given.seed, count, own.parts)
                write_atomically(path, b"".join(line_of(row) for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
