"""Makes answers to learn from of answers that a small model gave: each ends where it should have.

    python benchmarks/pasta/tidy.py answers.jsonl --points points.jsonl --prompts prompts.jsonl \
        --out answers.tidy.jsonl

An answer ends before the first unit (item, paragraph, run of sentences) that repeats an earlier
one or its name, or in which a run of eight words comes a second time. One that was cut off ends
before its last unit. What is then too short is left out. Nothing else is changed, and no word is
added. An answer in points (`points.py`) takes the other one's place if three points are left.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from points import opening_of

from stretto.bench.experiment import told
from stretto.data.rows import Answer, PromptBook, read_rows
from stretto.data.store import line_of
from stretto.data.topics import topic_of
from stretto.data.units import Unit, cut_units
from stretto.files import write_atomically
from stretto.train.scores import redundant_branches

LEAST_WORDS = 30
SAID_WORDS = 6
"""Units of fewer words may repeat one another: headings, names."""
LONGEST_WORD = 40
"""An answer with a longer one is left out."""
RUN_WORDS = 8
LEAST_POINTS = 3


def tidied(text: str, *, is_cut: bool) -> str:
    """The answer up to where it repeats itself or breaks off."""
    units = cut_units(text)
    words = [text[unit.body : unit.end].lower().split() for unit in units]
    said = [i for i, own in enumerate(words) if len(own) >= SAID_WORDS]
    last = len(units) - 1 if is_cut else len(units)
    repeats = redundant_branches([words[i] for i in said])
    last = min([last, *(said[i] for i in repeats), first_loop(words), first_namesake(text, units)])
    while last > 0 and units[last - 1].is_lead:
        last -= 1
    return text[: units[last - 1].end].rstrip() if last > 0 else ""


def first_loop(words: list[list[str]]) -> int:
    """The first unit in which a run of `RUN_WORDS` words comes that came before."""
    seen: set[tuple[str, ...]] = set()
    for index, own in enumerate(words):
        for at in range(len(own) - RUN_WORDS + 1):
            run = tuple(own[at : at + RUN_WORDS])
            if run in seen:
                return index
            seen.add(run)
    return len(words)


def first_namesake(text: str, units: list[Unit]) -> int:
    """The first unit that has the name of an earlier one."""
    seen: set[str] = set()
    for index, unit in enumerate(units):
        topic = topic_of(text, unit)
        name = topic.text.lower() if topic.is_name else ""
        if name in seen:
            return index
        seen |= {name} - {""}
    return len(units)


def in_points(natural: Answer, follows: Answer | None) -> str | None:
    """The tidy answer in points; None if there is none, or it has too few."""
    opening = opening_of(natural)
    if follows is None or opening is None:
        return None
    text = tidied(opening + follows.text, is_cut=follows.finish_reason != "stop")
    points = sum(unit.kind == "item" for unit in cut_units(text))
    return text if points >= LEAST_POINTS else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--points", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    book = PromptBook.read([arguments.prompts])
    follows = {row.key: row for row in read_rows(arguments.points, Answer)}
    lines, counts = [], Counter[str]()
    for answer in sorted(read_rows(arguments.answers, Answer), key=lambda row: row.key):
        points = in_points(answer, follows.get(answer.key))
        text = points or tidied(answer.text, is_cut=answer.finish_reason != "stop")
        words = text.split()
        if len(words) < LEAST_WORDS or max(map(len, words)) > LONGEST_WORD:
            counts["left out"] += 1
            continue
        counts["in points" if points else "as it was"] += 1
        lines.append(line_of({"prompt": book.prompt_of(answer), "response": text}))
    write_atomically(arguments.out, b"".join(lines))
    parts = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    print(f"{len(lines)} answers in {arguments.out}: {parts}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
