"""Chooses the prompts of the PASTA experiment from instruction data: open questions in English.

    python benchmarks/pasta/prompts.py --data DATA/instruct --out prompts.jsonl

Left out: prompts that an evaluation set holds too, code, tasks over a given text, and very short
or long ones. The answers in the data are not used: the model answers the prompts itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from stretto.data.rows import read_lines
from stretto.files import write_atomically

KINDS = {
    "databricks-dolly-15k": {"brainstorming", "creative_writing", "general_qa", "open_qa"},
    "gpteacher-roleplay": {None},
    "biggen-bench": {"instruction_following", "planning", "reasoning"},
}
"""Sources of the data, and the categories of each that are open questions."""
WORDS = (4, 60)


def chosen(folder: Path) -> list[str]:
    """The prompts, in the order of the files, each once."""
    prompts: dict[str, None] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for _, row in read_lines(path):
            prompt = str(row.get("instruction", "")).strip()
            is_open = row.get("category") in KINDS.get(row.get("source", ""), ())
            is_usual = WORDS[0] <= len(prompt.split()) <= WORDS[1]
            if is_open and is_usual and row.get("lang") == "en" and not row.get("eval_overlap"):
                prompts[prompt] = None
    return list(prompts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of JSONL files")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    prompts = chosen(arguments.data)
    if not prompts:
        print(f"no prompts in {arguments.data}; name the folder of instruction data")
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in prompts)
    write_atomically(arguments.out, lines.encode())
    print(f"{len(prompts)} prompts in {arguments.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
