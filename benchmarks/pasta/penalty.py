"""A repetition penalty for the evaluation: chosen where nothing is reported, and then handed on.

    python benchmarks/pasta/penalty.py choose penalty/1 penalty/1.1 --out penalty/chosen.json
    python benchmarks/pasta/penalty.py with penalty/chosen.json stretto eval run ...

Decoded greedily a small model often repeats itself to its last token, and what is held against such
a baseline looks many times as fast. `choose` reads runs of `stretto eval run` that differ in the
penalty alone, and takes the least under which at least 95 % of the answers end by themselves; if
there is none, the one under which most do. `with` runs a command with the option
`--repetition-penalty` after it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.bench.experiment import told
from stretto.errors import InvalidInput
from stretto.eval.folder import Run, load_run, read_json
from stretto.files import write_atomically

ENOUGH = 95.0
"""Percent of answers that end."""


def row_of(run: Run) -> dict[str, Any]:
    """The penalty of a run, how many answers it has, and the percent of them that end."""
    answers = [row.ours for row in run.rows if row.ours is not None]
    ended = sum(answer.finish_reason != "length" for answer in answers)
    return {
        "penalty": run.config["sampling"]["repetition_penalty"],
        "answers": len(answers),
        "ended": round(100 * ended / max(1, len(answers)), 1),
    }


def choice(rows: Sequence[dict[str, Any]]) -> float:
    """The least penalty under which enough end, or the one under which most do."""
    enough = [row["penalty"] for row in rows if row["ended"] >= ENOUGH]
    most = max(rows, key=lambda row: (row["ended"], -row["penalty"]))
    return float(min(enough, default=most["penalty"]))


def choose(folders: Sequence[Path], out: Path) -> None:
    """Writes the rows, sorted by penalty, and the choice. Raises `InvalidInput` for two runs of one
    penalty, or of other settings."""
    rows = sorted((row_of(run) for run in _alike(folders)), key=lambda row: float(row["penalty"]))
    told = {"enough": ENOUGH, "rows": rows, "penalty": choice(rows)}
    write_atomically(out, (json.dumps(told, indent=2) + "\n").encode())


def _alike(folders: Sequence[Path]) -> list[Run]:
    runs = [load_run(folder) for folder in folders]
    settings = [run.config | {"sampling": None} for run in runs]
    penalties = [run.config["sampling"]["repetition_penalty"] for run in runs]
    for folder, own, penalty in zip(folders, settings, penalties, strict=True):
        if own != settings[0] or penalties.count(penalty) > 1:
            raise InvalidInput(
                f"{folder} differs from {folders[0]} in more than its penalty, or has one "
                f"({penalty}) that another run has; give runs of one model, a penalty each"
            )
    return runs


def with_penalty(chosen: Path, command: Sequence[str]) -> list[str]:
    """The command line under this very Python."""
    penalty = read_json(chosen)["penalty"]
    own = ["-m", "stretto", *command[1:]] if command[0] == "stretto" else list(command)
    return [sys.executable, *own, "--repetition-penalty", f"{penalty:g}"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    choosing = kinds.add_parser("choose")
    choosing.add_argument("folders", type=Path, nargs="+")
    choosing.add_argument("--out", type=Path, required=True)
    running = kinds.add_parser("with")
    running.add_argument("chosen", type=Path)
    running.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.kind == "choose":
        choose(given.folders, given.out)
        return 0
    return subprocess.run(with_penalty(given.chosen, given.command), check=False).returncode


if __name__ == "__main__":
    sys.exit(told(main))
