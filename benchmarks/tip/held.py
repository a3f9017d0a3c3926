"""What labels hold of the problems that the experiment is about: mean live generated tokens.

    python benchmarks/tip/held.py

The problems are the first of the validation split, sizes in turn; `dense` is the text without
registers. Writes benchmarks/results/problems/held.json and prints the table of
docs/tip-experiment.md. No model.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from sizes import NORMAL

from stretto.data.labels import Labels
from stretto.problems import parse_sizes, problems

RESULT = Path(__file__).parents[1] / "results" / "problems" / "held.json"
NUM_PROBLEMS = 54
SIZES = ("16-24", NORMAL.sizes)
LABELS = {
    "at once": Labels("liveness", NORMAL.registers),
    "up to 1 step late": Labels("liveness", NORMAL.registers, slack=1),
    "up to 2": Labels("liveness", NORMAL.registers, slack=2),
    f"{NORMAL.in_turn} in turn": Labels("round-robin", NORMAL.in_turn),
}


def measured(task: str, sizes: str, count: int = NUM_PROBLEMS) -> dict[str, Any]:
    """A row; what `Labels` cannot hold in so many registers is left out for all."""
    found = list(problems(task, parse_sizes(sizes), count, split="valid"))
    labelled = [[one.labelled(labels) for labels in LABELS.values()] for one in found]
    kept = [(p, own) for p, own in zip(found, labelled, strict=True) if None not in own]
    row: dict[str, Any] = {"task": task, "sizes": sizes, "problems": len(kept)}
    row["dense"] = statistics.fmean((len(p.response()) + 1) / 2 for p, _ in kept)
    for k, name in enumerate(LABELS):
        row[name] = statistics.fmean(own[k].details["mean_live"] for _, own in kept if own[k])
    return row


def main() -> None:
    rows = [measured(task, sizes) for sizes in SIZES for task in NORMAL.tasks]
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    names = ("dense", *LABELS)
    print(f"| sizes | task | {' | '.join(names)} |")
    print("|---" * (2 + len(names)) + "|")
    for sizes in SIZES:
        own = [row for row in rows if row["sizes"] == sizes]
        for row in own:
            held = " | ".join(f"{row[name]:.1f}" for name in names)
            print(f"| {sizes} | {row['task']} | {held} |")
        both = [row for row in own if row["task"] in ("program", "tree")]
        total = {name: sum(row[name] for row in both) for name in names}
        saved = " | ".join(f"{100 * (1 - total[name] / total['dense']):.1f} %" for name in LABELS)
        print(f"| {sizes} | saved, program and tree | | {saved} |")


if __name__ == "__main__":
    main()
