"""Finds reference answers to prompts of an evaluation, in instruction data that holds them too.

    python benchmarks/pasta/references.py --data DATA/instruct --prompts PROMPTS --out FILE

They are for a judge alone: `prompts.py` leaves out all prompts that an evaluation set holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from stretto.data.rows import read_lines, read_sources
from stretto.files import write_atomically


def found(folder: Path, prompts: set[str]) -> list[dict[str, str]]:
    """Answers to the prompts, in the order of the files: of some prompts none, of some several."""
    rows = (row for path in sorted(folder.glob("*.jsonl")) for _, row in read_lines(path))
    return [
        {"prompt": row["instruction"], "reference": row["response"]}
        for row in rows
        if row.get("instruction") in prompts and str(row.get("response") or "").strip()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of JSONL files")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with the prompts")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    prompts = {source.prompt for source in read_sources([arguments.prompts])}
    rows = found(arguments.data, prompts)
    if not rows:
        print(f"{arguments.data} answers no prompt of {arguments.prompts}; name other data")
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(arguments.out, lines.encode())
    answered = len({row["prompt"] for row in rows})
    print(
        f"{len(rows)} references, to {answered} of {len(prompts)} prompts, in {arguments.out}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
