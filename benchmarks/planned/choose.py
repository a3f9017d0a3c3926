"""Chooses the planned ways that are compared, on problems that nothing is reported of.

    python benchmarks/planned/choose.py --answers answers/valid.jsonl --out chosen/chosen.json

For each goal: the best of the planned ways that are fast enough, the fastest if none is. For each
way without a plan: the best of the planned ways that are as fast as it. By quality.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from answers import Decoded
from cells import CELLS, REFERENCE
from claims import PLANNED, RIVALS, TO_BEAT, goal_name, group_of, pick
from figures import QUALITIES, Measured, of_cells

from stretto.data.rows import read_rows
from stretto.files import write_atomically


def choose(found: Mapping[str, Measured]) -> dict[str, Any]:
    """Names of planned ways by quality: under `goals` by goal, under `rivals` by rival."""
    planned = group_of(found, *PLANNED)
    rivals, reference = group_of(found, *RIVALS), found[REFERENCE]
    goals = {
        quality: {
            goal_name(*goal): pick(planned, reference, quality, goal[0]).cell.name
            for goal in TO_BEAT
        }
        for quality in QUALITIES
    }
    against = {
        quality: {r.cell.name: pick(planned, r, quality).cell.name for r in rivals}
        for quality in QUALITIES
    }
    return {"problems": len(reference.rows), "goals": goals, "rivals": against}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--answers", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True)
    return made


def main() -> int:
    given = parser().parse_args()
    found = {m.cell.name: m for m in of_cells(CELLS, read_rows(given.answers, Decoded))}
    if not group_of(found, *PLANNED):
        raise SystemExit(f"{given.answers} has no answers of {REFERENCE} and planned ways alike")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out, (json.dumps(choose(found), indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
