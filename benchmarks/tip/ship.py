"""Puts a TIP model into the package, with its card and checksums.

    python benchmarks/tip/ship.py

Reads only what the stages kept in benchmarks/results/tip. The model is that of the weight of KV
that `choose.py` chose on the validation problems, first training seed; what the card tells of it
was measured on the test problems.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stages import BASE, KV, NORMAL

from stretto.bench.shipping import asked, ship

RESULTS = Path(__file__).resolve().parent.parent / "results" / "tip"
NAME = "tiny-tip"
CHOSEN = Path("choose")
DENSE = "dense-grpo"
TABLE = Path("report") / f"program+tree-{NORMAL.sizes}.csv"
SUPERVISED = "tip-sft"

CARD = """# {name}

A model of {parameters:.1f} million parameters ({size:.1f} MB) that lets go of what it no longer
needs: it writes a register before each step, and a step's keys and values are dropped when its
register is written again. It was trained from random weights on made problems and knows nothing
else. `stretto demo tip` shows it at work.

- **What it is for**: showing, testing and measuring dialect `tip` on a machine without a GPU.
- **What it is not for**: anything but Stretto's made problems (tasks {tasks}). Its vocabulary is
  theirs.
- **How it was made**: arm `{arm}` of `make reproduce-tip`, training seed {seed}: supervised
  training on {base:,} problems without registers and {rows:,} with registers by liveness, then
  {steps} steps of GRPO with weight {weight} of KV, which was chosen on validation problems. The
  commands are in `benchmarks/results/tip/*/stage.json`.
- **Data**: made by Stretto from a seed; no text of anybody else, no answer of another model.
- **Licence**: Apache-2.0, as this project.
- **Measured** (programs and trees of {sizes} steps, test problems, mean over training seeds):
  {measured}. Baselines at the same budget, longer problems, speed: `benchmarks/results/tip/report`.
"""


def measured(rows: Sequence[dict[str, str]]) -> str:
    """What the report says of the arm, beside the dense one. Raises `SystemExit` without it."""
    found = {row["arm"]: row for row in rows}
    if missing := {KV, DENSE} - set(found):
        raise SystemExit(f"{TABLE} has no arm {min(missing)}; run the stage report first")

    def told(arm: str, name: str) -> str:
        value, low, high = (float(found[arm][f"{name}{end}"]) for end in ("", "_low", "_high"))
        return f"{value:.1f} ({low:.1f} to {high:.1f})"

    return (
        f"{told(KV, 'accuracy')} % right, the same training without registers "
        f"{told(DENSE, 'accuracy')} %; {told(KV, 'live')} live generated tokens on average, "
        f"{told(KV, 'saved')} % less than dense decoding of as many holds"
    )


def card(results: Path, model: Path) -> str:
    """The model card, from what the stages wrote."""
    seed = NORMAL.seeds[0]
    base, learnt = (
        json.loads((results / run / "summary.json").read_bytes())
        for run in (BASE, f"{SUPERVISED}-{seed}")
    )
    with (results / TABLE).open(encoding="utf-8", newline="") as file:
        text = measured(list(csv.DictReader(file)))
    return CARD.format(
        name=NAME,
        parameters=learnt["trained_parameters"] / 1e6,
        size=(model / "model.safetensors").stat().st_size / 1e6,
        tasks=", ".join(f"`{task}`" for task in NORMAL.tasks),
        arm=KV,
        seed=seed,
        base=base["train"]["examples"],
        rows=learnt["train"]["examples"],
        steps=NORMAL.grpo.steps,
        weight=json.loads((results / CHOSEN / "choice.json").read_bytes())["chosen"],
        sizes=NORMAL.sizes,
        measured=text,
    )


def main(argv: Sequence[str] | None = None) -> int:
    results, out = asked(argv, __doc__, RESULTS, NAME)
    model = results / CHOSEN / "model"
    ship(model, out, card(results, model), source={"experiment": "tip", "arm": KV})
    print(f"{KV} is {out.name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
