"""Puts a planned model into the package, with its card and checksums.

    python benchmarks/planned/ship.py

Reads only what the stages kept in benchmarks/results/planned. Of the arms `sparse` and `dense` the
one is taken whose answers to the validation problems, decoded in the plain way, have the right
total most often; of equals the one with more right parts, then `sparse`. What the card tells of it
was measured on the test problems.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from answers import Decoded
from cells import BASE

from stretto.bench.shipping import asked, ship
from stretto.data.rows import read_rows

RESULTS = Path(__file__).resolve().parent.parent / "results" / "planned"
NAME = "tiny-planned"
ARMS = ("sparse", "dense")
POINTS = 1
VALID = Path("answers-valid") / "valid.jsonl"
TABLE = Path("report") / "table.json"

CARD = """# {name}

A model of {parameters:.1f} million parameters ({size:.1f} MB) that writes by planning: a plan of
topics and lengths first, then all of its parts at once, masks that turn into words. It was trained
from random weights on one kind of made problem and knows nothing else. `stretto demo planned` shows
it at work.

- **What it is for**: showing, testing and measuring dialect `planned` on a machine without a GPU.
- **What it is not for**: anything but problems of task `multipart`. Its vocabulary is theirs.
- **How it was made**: arm `{arm}` of `make reproduce-planned` (variant `{variant}`, convention
  `{convention}`). An autoregressive model learnt {learnt:,} problems of one to five parts
  for {base_epochs:g} epochs; this one went on from it and learnt {rows:,} of them as plans, for
  {epochs:g}. The commands are in `benchmarks/results/planned`, `base/stage.json` and
  `{arm}/stage.json`.
- **Data**: made by Stretto from a seed; no text of anybody else, no answer of another model.
- **Licence**: Apache-2.0, as this project.
- **Measured**: {measured}. All ways to decode it, and what it is compared with:
  `benchmarks/results/planned/report`.
"""


def favoured(rows: Sequence[Decoded]) -> str:
    """The arm to ship, by its answers in the plain way. Raises `SystemExit` if one has none."""
    found: dict[str, tuple[float, float]] = {}
    for arm in ARMS:
        own = [row for row in rows if row.cell == arm]
        if not own:
            raise SystemExit(f"there are no answers of {arm} in {VALID}; run that stage first")
        found[arm] = (
            statistics.fmean(row.right for row in own), statistics.fmean(row.parts for row in own)
        )  # fmt: skip
    return max(ARMS, key=lambda arm: found[arm])


def measured(table: Sequence[dict[str, Any]], arm: str) -> str:
    """What the report says of the arm's plain way, and of its fastest one that has at most `POINTS`
    fewer right totals."""
    plain = next(row for row in table if row["cell"] == arm)
    own = [
        row
        for row in table
        if row["group"] == arm and row["speedup"] is not None
        and row["right"] >= plain["right"] - POINTS
    ]  # fmt: skip
    fastest = max(own, key=lambda row: row["speedup"])

    def told(row: dict[str, Any]) -> str:
        right, speed = (
            f"{row[name]:.{digits}f}{unit} ({row[f'{name}_low']:.{digits}f} to "
            f"{row[f'{name}_high']:.{digits}f})"
            for name, digits, unit in (("right", 0, " %"), ("speedup", 2, ""))
        )
        return f"{right} of totals right, {speed} times as fast as the autoregressive arm"

    text = f"one pass a token of a span, {told(plain)}"
    if fastest["cell"] != arm:
        named = f"with {fastest['knob']}, its fastest way within {POINTS} point of that"
        text += f"; {named}, {told(fastest)}"
    return f"{text}; {plain['problems']} test problems"


def card(results: Path, arm: str) -> str:
    """The model card, from what the stages wrote."""
    model = results / arm / "model"
    own = json.loads((model / "stretto.json").read_bytes())
    summary = json.loads((results / arm / "summary.json").read_bytes())
    base = json.loads((results / BASE / "summary.json").read_bytes())
    epochs, base_epochs = (
        json.loads((results / run / "config.json").read_bytes())["settings"]["epochs"]
        for run in (arm, BASE)
    )
    return CARD.format(
        name=NAME,
        parameters=summary["trained_parameters"] / 1e6,
        size=(model / "model.safetensors").stat().st_size / 1e6,
        arm=arm,
        variant=own["variant"],
        convention=own["convention"],
        learnt=base["train"]["examples"],
        base_epochs=base_epochs,
        rows=summary["train"]["examples"],
        epochs=epochs,
        measured=measured(json.loads((results / TABLE).read_bytes()), arm),
    )


def main(argv: Sequence[str] | None = None) -> int:
    results, out = asked(argv, __doc__, RESULTS, NAME)
    arm = favoured(list(read_rows(results / VALID, Decoded)))
    source = {"experiment": "planned", "arm": arm}
    ship(results / arm / "model", out, card(results, arm), source=source)
    print(f"{arm} is {out.name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
