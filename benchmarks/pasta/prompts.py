"""Chooses the prompts of the PASTA experiment from instruction data: open questions in English.

    python benchmarks/pasta/prompts.py --data DATA/instruct --out prompts.jsonl

Left out: prompts that an evaluation set holds too, code, tasks over a given text, and very short
or long ones. The answers in the data are not used: the model answers the prompts itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instruct import rows_in, text_in

from stretto.bench.experiment import told
from stretto.data.store import line_of
from stretto.errors import InvalidInput
from stretto.files import write_atomically

KINDS = {
    "databricks-dolly-15k": {"brainstorming", "creative_writing", "general_qa", "open_qa"},
    "gpteacher-roleplay": {None},
    "biggen-bench": {"instruction_following", "planning", "reasoning"},
}
"""Sources of the data, and the categories of each that are open questions."""
WORDS = (4, 60)


def chosen(folder: Path) -> list[str]:
    """The prompts, in the order of the files, each once. Raises `InvalidInput` as `rows_in` and
    `text_in`, and where there are none."""
    prompts: dict[str, None] = {}
    for place, row in rows_in(folder):
        prompt, source, category, language = (
            text_in(place, row, name) for name in ("instruction", "source", "category", "lang")
        )
        prompt = (prompt or "").strip()
        is_open = category in KINDS.get(source or "", ())
        is_usual = WORDS[0] <= len(prompt.split()) <= WORDS[1]
        if is_open and is_usual and language == "en" and not row.get("eval_overlap"):
            prompts[prompt] = None
    if not prompts:
        raise InvalidInput(f"no prompts in {folder}; name the folder of instruction data")
    return list(prompts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of JSONL files")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    prompts = chosen(arguments.data)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.out, b"".join(line_of({"prompt": p}) for p in prompts))
    print(f"{len(prompts)} prompts in {arguments.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
