"""Chooses the weight of KV by answers to problems of the validation split, and nothing else.

    python benchmarks/tip/choose.py --plain valid/tip-grpo-0.jsonl \\
        --weight 0.3=valid/a.jsonl:runs/a --weight 1=valid/b.jsonl:runs/b --out choose

Each weight with its answers and the run that it was trained in.

Of the weights whose accuracy is not below that of weight 0 by more than `--tolerance`, the one that
holds the fewest live generated tokens; if there is none, the most accurate one. The folder `--out`
gets `kv.toml`, settings of `stretto train grpo` for other seeds, `choice.json`, which says how it
came about, and model and metrics of the run that was chosen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

from answered import Solved, read_solved

from stretto.files import write_atomically


def choice(plain: list[Solved], weights: dict[str, list[Solved]], tolerance: float) -> str:
    """The chosen weight."""
    accuracy = {name: right(rows) for name, rows in weights.items()}
    good = [name for name in weights if accuracy[name] >= right(plain) - tolerance]
    if good:
        return min(good, key=lambda name: held(weights[name]))
    return max(weights, key=lambda name: accuracy[name])


def right(rows: list[Solved]) -> float:
    return statistics.fmean(row.is_right for row in rows)


def held(rows: list[Solved]) -> float:
    return statistics.fmean(row.generated_mean for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", type=Path, required=True)
    parser.add_argument("--weight", action="append", required=True, metavar="X=FILE:RUN")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs: dict[str, Path] = {}
    weights: dict[str, list[Solved]] = {}
    for text in given.weight:
        name, _, rest = text.partition("=")
        file, _, folder = rest.partition(":")
        weights[name], runs[name] = read_solved([Path(file)]), Path(folder)
    plain = read_solved([given.plain])
    found = choice(plain, weights, given.tolerance)
    told = {
        "chosen": found,
        "tolerance": given.tolerance,
        "by_weight": {
            name: {"accuracy": right(rows), "generated_mean": held(rows), "answers": len(rows)}
            for name, rows in {"0": plain, **weights}.items()
        },
    }
    given.out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(runs[found] / "model", given.out / "model", dirs_exist_ok=True)
    shutil.copy(runs[found] / "metrics.jsonl", given.out / "metrics.jsonl")
    write_atomically(given.out / "kv.toml", f"kv_weight = {float(found)}\n".encode())
    text = json.dumps(told, indent=1) + "\n"
    write_atomically(given.out / "choice.json", text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
