"""Chooses annotator `likelihood`'s threshold, and says how well its score tells parts that need
earlier parts from parts that do not.

    python benchmarks/pasta/choose_thresholds.py --out benchmarks/results/likelihood

The threshold is chosen on the validation split and judged on the test split; the two share no
content. `--data` adds a harder set made of real text, of which no text is written out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from known_dependence import SPLITS, from_data, response_of, synthetic

from stretto.bench.machine import describe_machine
from stretto.data import likelihood_loss as loss
from stretto.data.likelihood_scorer import ModelScorer
from stretto.data.likelihood_views import first_views, prepare

Row = dict[str, Any]
MISSED_WEIGHT = 2
"""A dependence that is missed counts so many times a promise that is not made: the one is a wrong
answer, the other a slower one."""
SHOWN = {
    "loss": "excess",
    "mean gain": "mean",
    "largest gain": "largest",
    "form alone": "structure",
}
STRUCTURE = {"paragraph": 2.0, "sentences": 2.0, "item": 0.0}


def measured(scorer: ModelScorer, source: Iterable[Any], name: str) -> tuple[list[Row], Row]:
    """A row for each part before which something would be hidden, and what the pass took."""
    rows: list[Row] = []
    works, labels = [], []
    for number, (known, form) in enumerate(source):
        response, ends = response_of(known, form)
        works.append(prepare(scorer.prompt_ids(known.prompt), response, scorer.vocabulary))
        labels.append((number, known, form, ends))
    views = [first_views(work) for work in works]
    began, cpu = time.perf_counter(), time.process_time()
    read = scorer.score([view.sheet for view in views])
    took = {
        "responses": len(works),
        "tokens": sum(view.sheet.num_tokens for view in views),
        "wall_s": round(time.perf_counter() - began, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }
    for work, view, found, (number, known, form, ends) in zip(
        works, views, read, labels, strict=True
    ):
        for index, (part, full, blind) in enumerate(
            zip(work.parts, view.full, view.blind, strict=True)
        ):
            depends = [d for end, d in ends if part.unit.start <= end < part.unit.end]
            if full is None or blind is None or not depends:
                continue
            rows.append(
                {
                    "set": name, "response": number, "group": known.group, "form": form,
                    "kind": part.unit.kind, "depends": depends[-1],
                    "response_depends": known.is_dependent,
                    **scores(part, work.parts[:index], found[full], found[blind]),
                }
            )  # fmt: skip
    return rows, took


def scores(part: Any, elders: Any, full: Any, blind: Any) -> dict[str, float]:
    """Our score and its rivals. `structure`: what the form alone says, no model needed."""
    counted = np.ones(len(full), np.bool_)
    counted[: part.num_marker] = False
    if part.is_hidden and part.num_named < len(counted):
        counted[part.num_named] = False
    gains = (full - blind)[counted]
    size = max(len(gains), loss.LEAST_TOKENS)
    found = {
        "excess": loss.loss_of(part, elders, full, blind).rate,
        "mean": float(gains.sum()) / size,
        "mean of all tokens": float((full - blind).mean()),
        "total": float(gains.sum()),
        "largest": float(gains.max(initial=0.0)),
        "structure": STRUCTURE.get(part.unit.kind, 1.0) - part.topic.is_name,
    }
    for nats in (1.0, 3.0, 4.0):
        found[f"excess over {nats:g}"] = float(np.maximum(gains - nats, 0).sum()) / size
    return found


def auc(dependent: Sequence[float], independent: Sequence[float]) -> float:
    """How often a dependent part has the higher score; ties count half."""
    high, low = np.asarray(dependent)[:, None], np.asarray(independent)[None, :]
    return float((high > low).mean() + (high == low).mean() / 2)


def aucs(rows: Sequence[Row], names: Iterable[str], seed: int = 0) -> Row:
    """AUC of each score over parts, with a bootstrap interval of 95 % over responses."""
    known = [r for r in rows if r["depends"] is not None]
    return {name: _interval(known, name, "depends", seed) for name in names}


def response_aucs(rows: Sequence[Row], names: Iterable[str], seed: int = 0) -> Row:
    """The same over whole responses: the mean over a response's parts."""
    by: dict[int, list[Row]] = {}
    for row in rows:
        by.setdefault(row["response"], []).append(row)
    means = [
        {
            "response": n,
            "response_depends": some[0]["response_depends"],
            **{name: float(np.mean([r[name] for r in some])) for name in names},
        }
        for n, some in by.items()
    ]
    return {name: _interval(means, name, "response_depends", seed) for name in names}


def _interval(rows: Sequence[Row], name: str, label: str, seed: int) -> list[float]:
    by: dict[int, list[Row]] = {}
    for row in rows:
        by.setdefault(row["response"], []).append(row)
    groups = list(by.values())
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(500):
        some = [r for i in rng.integers(len(groups), size=len(groups)) for r in groups[i]]
        if len({bool(r[label]) for r in some}) == 2:
            drawn.append(_auc_of(some, name, label))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return [round(float(v), 3) for v in (_auc_of(rows, name, label), low, high)]


def _auc_of(rows: Sequence[Row], name: str, label: str) -> float:
    return auc([r[name] for r in rows if r[label]], [r[name] for r in rows if not r[label]])


def chosen(rows: Sequence[Row]) -> tuple[float, list[Row]]:
    """The threshold of the best `value`, in the middle of those that share it."""
    known = [r for r in rows if r["depends"] is not None]
    thresholds = np.round(np.arange(0, 0.6, 0.005), 3).tolist()
    table = [{"max_loss": t, **rates(known, t)} for t in thresholds]
    best = max(row["value"] for row in table)
    among = [row["max_loss"] for row in table if row["value"] > best - 1e-9]
    return float(among[len(among) // 2]), table


def rates(rows: Sequence[Row], threshold: float) -> Row:
    """`kept`: of dependent parts, those kept from being blind; `freed`: of the others, those that
    may be promised."""
    kept = [r["excess"] > threshold for r in rows if r["depends"]]
    freed = [r["excess"] <= threshold for r in rows if r["depends"] is False]
    both = float(np.mean(kept)), float(np.mean(freed))
    value = (MISSED_WEIGHT * both[0] + both[1]) / (MISSED_WEIGHT + 1)
    return {"kept": round(both[0], 3), "freed": round(both[1], 3), "value": round(value, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--model", default=None, help="reference model; the embedded one")
    parser.add_argument("--data", type=Path, default=None, help="folder with instruct/ and math/")
    parser.add_argument("--num-each", type=int, default=6, help="responses of each kind")
    args = parser.parse_args()
    scorer = ModelScorer.load(args.model)
    rows: dict[str, list[Row]] = {}
    took = {}
    for split in SPLITS:
        rows[split], took[split] = measured(scorer, synthetic(split, args.num_each), split)
    if args.data is not None:
        source = from_data(args.data, "test", 5 * args.num_each)
        rows["real text"], took["real text"] = measured(scorer, source, "real text")
    names = list(scores_named(rows["validation"]))
    shown = ["DATA" if a == str(args.data) else a for a in sys.argv[1:]]
    threshold, table = chosen(rows["validation"])
    report = {
        "model": scorer.name,
        "command": f"python benchmarks/pasta/choose_thresholds.py {shlex.join(shown)}",
        "machine": describe_machine(),
        "seed": 0,
        "chosen_max_loss": threshold,
        "at_chosen": {s: rates([r for r in some if r["depends"] is not None], threshold)
                      for s, some in rows.items() if s in SPLITS},
        "auc_parts": {s: aucs(some, names) for s, some in rows.items() if s in SPLITS},
        "auc_responses": {s: response_aucs(some, names) for s, some in rows.items()},
        "took": took,
        "definitions": {
            "auc": "[value, low, high]: chance that a dependent one scores higher; bootstrap 95 %",
            "kept": "share of dependent parts above the threshold",
            "freed": "share of independent parts at or below it",
            "value": f"({MISSED_WEIGHT} kept + freed) / {MISSED_WEIGHT + 1}: what is chosen by",
            "excess": "the score that the annotator uses; the others are its rivals",
        },
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "parts.jsonl").open("w", encoding="utf-8") as file:
        for some in rows.values():
            for row in some:
                file.write(json.dumps(_rounded(row)) + "\n")
    (args.out / "threshold.json").write_text(
        json.dumps({**report, "table": table}, indent=1) + "\n"
    )
    print("\n".join(table_of(report)))


def table_of(report: Row) -> list[str]:
    """The lines of the table in docs/likelihood.md."""

    def cell(values: Sequence[float]) -> str:
        return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"

    lines = ["| AUC | " + " | ".join(SHOWN) + " |", "|---" * (len(SHOWN) + 1) + "|"]
    for what in ("parts", "responses"):
        for split, found in report[f"auc_{what}"].items():
            cells = [cell(found[score]) for score in SHOWN.values()]
            lines.append(f"| {what}, {split} | " + " | ".join(cells) + " |")
    return lines


def scores_named(rows: Sequence[Row]) -> list[str]:
    return [k for k, v in rows[0].items() if isinstance(v, float)]


def _rounded(row: Row) -> Row:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


if __name__ == "__main__":
    main()
