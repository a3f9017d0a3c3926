"""Finds reference answers to prompts of an evaluation, in instruction data that holds them too.

    python benchmarks/pasta/references.py --data DATA/instruct --prompts PROMPTS --out FILE

They are for a judge alone: `prompts.py` leaves out all prompts that an evaluation set holds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instruct import rows_in, text_in

from stretto.bench.experiment import told
from stretto.data.rows import read_sources
from stretto.data.store import line_of
from stretto.errors import InvalidInput
from stretto.files import write_atomically


def found(folder: Path, prompts: set[str]) -> list[dict[str, str]]:
    """Answers to the prompts, in the order of the files: of some prompts none, of some several.
    Raises `InvalidInput` as `rows_in` and `text_in`."""
    answers = []
    for place, row in rows_in(folder):
        prompt = text_in(place, row, "instruction")
        if prompt in prompts and (answer := text_in(place, row, "response") or "").strip():
            answers.append({"prompt": prompt, "reference": answer})
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of JSONL files")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with the prompts")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    prompts = {source.prompt for source in read_sources([arguments.prompts])}
    rows = found(arguments.data, prompts)
    if not rows:
        raise InvalidInput(
            f"{arguments.data} answers no prompt of {arguments.prompts}; name other data"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.out, b"".join(map(line_of, rows)))
    answered = len({row["prompt"] for row in rows})
    print(
        f"{len(rows)} references, to {answered} of {len(prompts)} prompts, in {arguments.out}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
