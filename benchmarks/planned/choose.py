"""Chooses the planned ways that are compared, on problems that nothing is reported of.

    python benchmarks/planned/choose.py --answers answers/valid.jsonl \
        --costly answers/valid-costly.jsonl --out chosen/chosen.json

For each goal: the best of the planned ways that are fast enough, the fastest if none is; and the
same again among the ways that were timed at the cost of a larger model. For each way without a
plan: the best of the planned ways that are as fast as it. By quality.
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


def choose(found: Mapping[str, Measured], costly: Mapping[str, Measured]) -> dict[str, Any]:
    """Names of planned ways by quality: under `goals` and `costly` by goal, under `rivals` by
    rival."""
    planned = group_of(found, *PLANNED)
    rivals, reference = group_of(found, *RIVALS), found[REFERENCE]
    against = {
        quality: {r.cell.name: pick(planned, r, quality).cell.name for r in rivals}
        for quality in QUALITIES
    }
    return {
        "problems": len(reference.rows),
        "goals": _for_goals(found),
        "costly": _for_goals(costly),
        "rivals": against,
    }


def _for_goals(found: Mapping[str, Measured]) -> dict[str, dict[str, str]]:
    planned, reference = group_of(found, *PLANNED), found[REFERENCE]
    return {
        quality: {
            goal_name(*goal): pick(planned, reference, quality, goal[0]).cell.name
            for goal in TO_BEAT
        }
        for quality in QUALITIES
    }


def planned_of(answers: Path) -> dict[str, Measured]:
    """The answers of all ways by name. Ends the script where none of them plans."""
    found = {m.cell.name: m for m in of_cells(CELLS, read_rows(answers, Decoded))}
    if not group_of(found, *PLANNED):
        raise SystemExit(f"{answers} has no answers of {REFERENCE} and planned ways alike")
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--answers", type=Path, required=True)
    made.add_argument("--costly", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True)
    return made


def main() -> int:
    given = parser().parse_args()
    chosen = choose(planned_of(given.answers), planned_of(given.costly))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out, (json.dumps(chosen, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
