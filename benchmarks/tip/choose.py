"""Chooses the weight of KV by answers to problems of the validation split, and nothing else.

    python benchmarks/tip/choose.py --plain valid-weights/tip-grpo-0.jsonl \\
        --weight 0.3=valid-weights/a.jsonl:a --weight 1=valid-weights/b.jsonl:b --out choose

Each weight with its answers and the run that it was trained in.

Of the weights that are not surely less accurate than weight 0 (the 95 % interval of the difference,
paired by problem, reaches 0), the one that holds the fewest live generated tokens; if there is
none, the most accurate one. The folder `--out` gets `kv.toml`, settings of `stretto train grpo` for
other seeds, `choice.json`, which says how it came about, and model and metrics of the run that was
chosen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from answered import Solved, read_solved
from compared import Arm, accuracy, difference, live

from stretto.bench.experiment import told
from stretto.errors import InvalidInput
from stretto.files import write_atomically


def arm(name: str, rows: Sequence[Solved]) -> Arm:
    return Arm(name, {"": rows})


def choice(plain: Arm, weights: Mapping[str, Arm]) -> tuple[str, dict[str, Any]]:
    """The chosen weight, and what is to be told of each."""
    facts: dict[str, Any] = {plain.name: _figures(plain)}
    for name, own in weights.items():
        over = difference(own, plain, accuracy)
        facts[name] = {**_figures(own), "accuracy_over_weight_0": over.to_json()}
        facts[name]["is_as_right"] = over.estimate.high is not None and over.estimate.high >= 0
    good = [name for name in weights if facts[name]["is_as_right"]]
    if good:
        return min(good, key=lambda name: facts[name]["live"]), facts
    return max(weights, key=lambda name: facts[name]["accuracy"]), facts


def _figures(own: Arm) -> dict[str, Any]:
    means = {n: own.estimate(v).value for n, v in (("accuracy", accuracy), ("live", live))}
    return {**means, "answers": len(own.rows)}


def weight_of(text: str) -> tuple[str, Path, Path]:
    """From X=FILE:RUN. Raises `InvalidInput`."""
    name, _, rest = text.partition("=")
    file, _, folder = rest.partition(":")
    if not (name and file and folder):
        raise InvalidInput(f"weight {text!a} is none; give X=FILE:RUN")
    return name, Path(file), Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", type=Path, required=True)
    parser.add_argument("--weight", action="append", required=True, metavar="X=FILE:RUN")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    parts = [weight_of(text) for text in given.weight]
    runs = {name: run for name, _, run in parts}
    weights = {name: arm(name, read_solved([file])) for name, file, _ in parts}
    found, facts = choice(arm("0", read_solved([given.plain])), weights)
    given.out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(runs[found] / "model", given.out / "model", dirs_exist_ok=True)
    shutil.copy(runs[found] / "metrics.jsonl", given.out / "metrics.jsonl")
    write_atomically(given.out / "kv.toml", f"kv_weight = {float(found)}\n".encode())
    text = json.dumps({"chosen": found, "by_weight": facts}, indent=1) + "\n"
    write_atomically(given.out / "choice.json", text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
