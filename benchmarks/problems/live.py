"""What problems cost to hold: MaxLive and mean live tokens by task, size and labels.

    python benchmarks/problems/live.py

Writes benchmarks/results/problems/live.json and prints the table of docs/problems.md. No model.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from stretto.data.labels import Labels
from stretto.problems import LONGER_SIZES, TASKS, TRAIN_SIZES, problems

RESULT = Path(__file__).parents[1] / "results" / "problems" / "live.json"
NUM_PROBLEMS = 200
ARMS = {
    "liveness": Labels("liveness", 16),
    "slack 0 to 4": Labels("liveness", 16, slack=4),
    "in turn, N = 4": Labels("round-robin", 4),
    "in turn, N = 8": Labels("round-robin", 8),
    "in turn, N = 16": Labels("round-robin", 16),
    "random, N = 8": Labels("random", 8),
}


def measured(task: str, sizes: tuple[int, int], count: int) -> dict[str, Any]:
    """A row: figures are means over the first problems of the test split with seed 0, sizes in
    turn; `lost`: share of problems in which a step is let go of that is still needed."""
    sizes = (sizes[0], min(sizes[1], TASKS[task].max_size))
    found = list(problems(task, sizes, count, split="test"))
    row: dict[str, Any] = {"task": task, "sizes": list(sizes), "problems": count}
    for name, labels in ARMS.items():
        details = [labelled.details for p in found if (labelled := p.labelled(labels)) is not None]
        if name == "liveness":
            row["max_live"] = statistics.fmean(d["max_live"] for d in details)
            row["dense"] = statistics.fmean(d["dense_live"] for d in details)
        row[name] = {
            "live": statistics.fmean(d["mean_live"] for d in details),
            "lost": statistics.fmean(bool(d["needed_kills"]) for d in details),
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean live tokens of each arm, and in brackets the share that loses a step."""
    lines = [
        f"| task | size | MaxLive | dense | {' | '.join(ARMS)} |",
        "|---" * (4 + len(ARMS)) + "|",
    ]
    for row in rows:
        cells = [row["task"], "{}-{}".format(*row["sizes"])]
        cells += [f"{row['max_live']:.1f}", f"{row['dense']:.1f}"]
        for name in ARMS:
            lost = f" ({row[name]['lost']:.0%})" if row[name]["lost"] else ""
            cells.append(f"{row[name]['live']:.1f}{lost}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = [
        measured(t, sizes, NUM_PROBLEMS) for t in TASKS for sizes in (TRAIN_SIZES, LONGER_SIZES)
    ]
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(table(rows), end="")


if __name__ == "__main__":
    main()
