"""The report of the planned experiment: a table of all ways, frontiers, claims, pictures.

    python benchmarks/planned/report.py --out report

Reads `answers/*.jsonl` and the runs of training in the folder that it is run in. `table.json` has a
row a way: shares of right totals and right parts in percent, seconds of an answer (geometric mean),
steps, points over autoregressive decoding, and how many times faster it is, each with its 95 %
bootstrap interval over problems. `claims.json` says of what was to be shown whether it is so.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from answers import Decoded
from cells import CELLS, compute_cells
from figures import REFERENCE, claims, of_cells, on_frontier, table_row

from stretto.bench.machine import describe_machine
from stretto.bench.report import to_csv
from stretto.data.rows import read_rows
from stretto.files import write_atomically
from stretto.train.loop import lines_of

SHOWN = (
    ("cell", "way", ""),
    ("right", "right, %", ".1f"),
    ("parts", "right parts, %", ".1f"),
    ("seconds", "seconds", ".3f"),
    ("steps", "steps", ".0f"),
    ("speedup", "times faster", ".2f"),
    ("unfinished", "unfinished", "d"),
)
QUALITIES = ("right", "parts")
Rows = Sequence[Mapping[str, Any]]


def shares_of(folder: Path) -> tuple[str, ...]:
    found = (path.name.removeprefix("compute-") for path in folder.glob("compute-*.jsonl"))
    return tuple(sorted(name.removesuffix(".jsonl") for name in found))


def markdown(rows: Rows) -> str:
    lines = [f"| {' | '.join(title for _, title, _ in SHOWN)} |", "|---" * len(SHOWN) + "|"]
    for row in rows:
        values = [_shown(row, name, form) for name, _, form in SHOWN]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _shown(row: Mapping[str, Any], name: str, form: str) -> str:
    if row[name] is None:
        return "–"
    value = format(row[name], form)
    if f"{name}_low" not in row:
        return value
    low, high = (format(row[f"{name}_{end}"], form) for end in ("low", "high"))
    return f"{value} ({low}–{high})"


def trained(names: Sequence[str]) -> list[dict[str, Any]]:
    """What training of each arm took: tokens through the model, and its last losses."""
    found = []
    for name in names:
        lines = [line for line in lines_of(Path(name) / "metrics.jsonl") if line["kind"] == "train"]
        if not lines:
            continue
        losses = {k: v for k, v in lines[-1].items() if k.startswith("loss")}
        tokens, took = (sum(line[key] for line in lines) for key in ("tokens", "seconds"))
        found.append({"arm": name, "tokens": tokens, "seconds": round(took, 1), **losses})
    return found


def save_picture(out: Path, name: str, rows: Rows, quality: str) -> None:
    """Quality against seconds: a line a group of ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="seconds an answer", ylabel=f"{quality} (%)", xscale="log")
    for number, group in enumerate(dict.fromkeys(row["group"] for row in rows)):
        own = sorted((r for r in rows if r["group"] == group), key=lambda r: r["seconds"])
        height = [[max(0.0, r[quality] - r[f"{quality}_low"]) for r in own]]
        height.append([max(0.0, r[f"{quality}_high"] - r[quality]) for r in own])
        times, values = [r["seconds"] for r in own], [r[quality] for r in own]
        axes.errorbar(
            times, values, yerr=height, marker="so^vDP*X"[number % 8], linestyle="none",
            capsize=2, label=group,
        )  # fmt: skip
    figure.legend(loc="outside right upper", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomically(out / f"{name}.png", picture.getvalue())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    answers = Path("answers")
    rows = [row for path in sorted(answers.glob("*.jsonl")) for row in read_rows(path, Decoded)]
    less = compute_cells(shares_of(answers))
    measured = of_cells([*CELLS, *less], rows)
    reference = next((m for m in measured if m.cell.name == REFERENCE), None)
    if reference is None:
        raise SystemExit(f"no answers of {REFERENCE} in {answers}; run the stages before this one")
    table = [table_row(m, reference) for m in measured]
    knobs = [row for row in table if not row["knob"].startswith("compute")]
    told = {
        "machine": describe_machine(),
        "left_out": [c.name for c in (*CELLS, *less) if c.name not in {r["cell"] for r in table}],
        "frontier": {quality: on_frontier(knobs, quality) for quality in QUALITIES},
        "claims": {quality: claims(table, quality) for quality in QUALITIES},
        "trained": trained(list(dict.fromkeys(m.cell.arm for m in measured))),
    }
    files = {"table.json": table, "claims.json": told}
    for name, value in files.items():
        write_atomically(given.out / name, (json.dumps(value, indent=1) + "\n").encode())
    write_atomically(given.out / "table.csv", to_csv(table).encode())
    write_atomically(given.out / "table.md", markdown(table).encode())
    for quality in QUALITIES:
        save_picture(given.out, f"frontier-{quality}", knobs, quality)
    print(markdown(table), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
