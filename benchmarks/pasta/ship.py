"""Puts the adapter that the validation stage favours into the package, with its model card.

    python benchmarks/pasta/ship.py

Reads only what the stages kept in benchmarks/results/pasta. Of the arms that are well-formed in at
least 95 % of answers and whose win rate is not below 50 by more than its interval the fastest by
structure is taken; if there is none, of the well-formed ones in which two threads write at once in
at least half of the answers the one of the highest win rate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages import NORMAL, evaluated

from stretto.bench.shipping import asked, ship

RESULTS = Path(__file__).resolve().parent.parent / "results" / "pasta"
NAME = "smollm2-135m-pasta"
WANTED = ("adapter_config.json", "adapter_model.safetensors", "base.json", "stretto.json")
OPTIONAL = "preference.json"
WELL_FORMED = 0.95

CARD = """# {name}

An adapter (LoRA, rank 4, and six rows for control tokens; {size:.1f} MB) that teaches
SmolLM2-135M-Instruct, Stretto's embedded model, to promise: it writes `<promise topic= tokens=/>`
where a part of its answer can be decoded by itself, and the runtime decodes such parts at once.
`stretto run "…"` uses it; `--model smollm2-135m-instruct` is the model without it.

- **What it is for**: showing, testing and measuring parallel decoding on a machine without a GPU.
- **What it is not for**: facts. A model of this size is often wrong, with and without the adapter.
  It was taught in English, on open questions, and answers in numbered points wherever it can.
- **How it was made**: arm `{arm}` of `make reproduce-pasta`. Answers are the embedded model's own
  (temperature 0.5, seeds 0 and 1), the longer ones given again in points; annotations were measured
  by the same model (annotator `likelihood`); supervised training on {rows} rows for {epochs:g}
  epochs{preference}. The commands are in `benchmarks/results/pasta/*/stage.json`.
- **Data**: prompts alone, from databricks-dolly-15k (CC BY-SA 3.0), GPTeacher Roleplay (MIT) and
  BiGGen-Bench (Apache-2.0), none of which an evaluation set holds. No answer of another model.
- **Licence**: Apache-2.0, as the base model and this project.
- **Measured** (80 prompts of Vicuna, greedy, at most {max_tokens} tokens, the stage `validation` by
  which it was chosen): {measured}.
- **Known limits**: most of its speed-up over a greedy baseline is that the baseline loops and it
  does not; where the baseline ends by itself the gain is small. It hardly ever writes a `<sync/>`.
- Against Baseline-SFT, the same model taught the same answers without promises; the judge is a
  proxy, the length-controlled likelihood under the base model. More: `docs/pasta-results.md`.
"""


def favoured(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run to ship. Raises `SystemExit` if none qualifies."""
    runs = [run for run in runs if run["well_formed"] >= WELL_FORMED]
    as_good = [run for run in runs if run["win_rate_high"] >= 50]
    if as_good:
        return max(as_good, key=lambda run: run["theoretical"])
    forking = [run for run in runs if run["two_at_once"] >= 0.5]
    if not forking:
        raise SystemExit(
            "no well-formed arm is as good as the baseline or forks in half of its answers"
        )
    return max(forking, key=lambda run: run["win_rate"])


def card(results: Path, run: dict[str, Any], model: Path) -> str:
    """The model card, from what the stages wrote."""
    summary = json.loads((results / "sft-pasta" / "summary.json").read_bytes())
    notes = model / OPTIONAL
    preference = ""
    if notes.is_file():
        weight = run["run"].removeprefix("pasta-bon-").removesuffix("-r2")
        rounds = "two rounds" if run["run"].endswith("-r2") else "one round"
        preference = f", then {rounds} of preference training (weight of quality {weight})"
    measured = (
        f"win rate {run['win_rate']:.0f} ({run['win_rate_low']:.0f} to {run['win_rate_high']:.0f}; "
        f"50 is a tie), theoretical speed-up {run['theoretical']:.2f} "
        f"({run['theoretical_low']:.2f} to {run['theoretical_high']:.2f}), parallelism "
        f"{run['parallelism']:.2f}, {100 * run['well_formed']:.0f} % well-formed, two threads at "
        f"once in {100 * run['two_at_once']:.0f} %, "
        f"{100 * (run['redundant'] or 0):.0f} % of forked threads redundant"
    )
    return CARD.format(
        name=NAME,
        size=(model / "adapter_model.safetensors").stat().st_size / 1e6,
        arm=run["run"],
        rows=summary["train"]["examples"],
        epochs=NORMAL.epochs,
        preference=preference,
        max_tokens=NORMAL.eval_tokens,
        measured=measured,
    )


def main(argv: Sequence[str] | None = None) -> int:
    results, out = asked(argv, __doc__, RESULTS, NAME)
    found = json.loads((results / "validation" / "compared" / "compare.json").read_bytes())
    run = favoured(found["runs"])
    model = results / evaluated(NORMAL)[run["run"]]
    names = WANTED if not (model / OPTIONAL).is_file() else (*WANTED, OPTIONAL)
    source = {"experiment": "pasta", "arm": run["run"]}
    ship(model, out, card(results, run, model), source=source, names=names)
    print(f"{run['run']} is {out.name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
