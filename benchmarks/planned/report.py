"""The report of the planned experiment: a table of all ways, frontiers, claims, pictures.

    python benchmarks/planned/report.py --out report

Reads `answers/*.jsonl`, what was chosen, what throughput was measured, and the runs of training in
the folder that it is run in. `table.json` has a row a way: shares of right totals, of right
parts, and of totals that are the sum of their own results, in percent; seconds of an answer
(geometric mean), steps, points over autoregressive decoding, and how many times faster it is, whole
and without the prompt, each with its 95 % bootstrap interval over problems; and tokens and seconds
of its training. `costly.json` has the same of the ways that were timed at the cost of a larger
model. `claims.json` says of what was to be shown whether it is so.
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
from cells import BASE, CELLS, REFERENCE, compute_cells
from claims import claims, costly_claims, thread_claims, throughput_claims
from figures import QUALITIES, Measured, by_cell, of_cells, on_frontier, table_row

from stretto.bench.machine import describe_machine
from stretto.bench.report import to_csv
from stretto.data.rows import read_rows
from stretto.files import write_atomically
from stretto.train.loop import lines_of

SHOWN = (
    ("cell", "way", ""),
    ("right", "right, %", ".1f"),
    ("parts", "right parts, %", ".1f"),
    ("sums", "adds up its own results, %", ".1f"),
    ("seconds", "seconds", ".3f"),
    ("steps", "steps", ".0f"),
    ("speedup", "times faster", ".2f"),
    ("training_tokens", "training tokens", ",.0f"),
    ("training_seconds", "training seconds", ",.0f"),
    ("unfinished", "unfinished", "d"),
)
MARKERS = "so^vDP*X"
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


def trained(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What training of each arm took, that of the base included: tokens through the model, by
    those of the reference too, and its last losses."""
    found = {}
    for name in names:
        lines = [
            line
            for run in (BASE, name)
            for line in lines_of(Path(run) / "metrics.jsonl")
            if line["kind"] == "train"
        ]
        if not lines:
            continue
        losses = {k: v for k, v in lines[-1].items() if k.startswith("loss")}
        tokens, took = (sum(line[key] for line in lines) for key in ("tokens", "seconds"))
        found[name] = {"tokens": tokens, "seconds": round(took, 1), **losses}
    if REFERENCE in found:
        for facts in found.values():
            facts["tokens_over_reference"] = round(facts["tokens"] / found[REFERENCE]["tokens"], 3)
    return found


def save_picture(path: Path, rows: Rows, quality: str, against: str, label: str) -> None:
    """Quality against a figure of the rows, with intervals: a line a group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=label, ylabel=f"{quality} (%)", xscale="log")
    for number, group in enumerate(dict.fromkeys(row["group"] for row in rows)):
        own = sorted((r for r in rows if r["group"] == group), key=lambda r: r[against])
        height = [[max(0.0, r[quality] - r[f"{quality}_low"]) for r in own]]
        height.append([max(0.0, r[f"{quality}_high"] - r[quality]) for r in own])
        axes.errorbar(
            [r[against] for r in own], [r[quality] for r in own], yerr=height, capsize=2,
            marker=MARKERS[number % len(MARKERS)], label=group,
            linestyle="-" if against == "training_tokens" else "none",
        )  # fmt: skip
    if rows:
        figure.legend(loc="outside right upper", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomically(path, picture.getvalue())


def learnt(table: Rows) -> Rows:
    """Rows of plain ways whose training is known: what an arm does after more and less of it."""
    kinds = ("", "epochs")
    plain = [r for r in table if r["knob"] in kinds or r["knob"].startswith("compute")]
    return [row for row in plain if row["training_tokens"] is not None]


def answers_of(folder: Path, *patterns: str) -> list[Decoded]:
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return [row for path in paths for row in read_rows(path, Decoded)]


def told(
    left_out: Sequence[str], tested: Mapping[str, Measured], costly: Mapping[str, Measured],
    table: Rows, taken: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """What `claims.json` says. `left_out`: ways that are not in the table; `tested`: with the
    further answers to problems that only the ways compared were asked; `costly`: at the cost of a
    larger model."""
    chosen = json.loads(Path("chosen/chosen.json").read_text())
    at_once = json.loads(Path("throughput/result.json").read_text())
    timed = [row for row in table if row["seconds"] is not None]
    return {
        "machine": describe_machine(),
        "left_out": left_out,
        "chosen": chosen,
        "frontier": {quality: on_frontier(timed, quality) for quality in QUALITIES},
        "claims": {q: claims(tested, chosen, q, taken) for q in QUALITIES},
        "costly": {q: costly_claims(tested, costly, chosen, q, taken) for q in QUALITIES},
        "threads": thread_claims(tested),
        "throughput": throughput_claims(at_once),
        "trained": taken,
    }


def report(out: Path) -> Rows:
    """Writes all files; the table."""
    out.mkdir(parents=True, exist_ok=True)
    answers = Path("answers")
    cells = [*CELLS, *compute_cells(shares_of(answers))]
    rows = answers_of(answers, "part-*.jsonl", "compute-*.jsonl")
    measured = of_cells(cells, rows)
    if not measured:
        raise SystemExit(f"no answers of {REFERENCE} in {answers}; run the stages before this one")
    taken = trained(list(dict.fromkeys(m.cell.arm for m in measured)))
    reference = next(m for m in measured if m.cell.name == REFERENCE)
    table = [table_row(m, reference, taken) for m in measured]
    names = {m.cell.name for m in measured}
    every = by_cell(CELLS, [*rows, *answers_of(answers, "more.jsonl")])
    tested = {name: m for name, m in every.items() if name in names}
    left_out = sorted({cell.name for cell in cells} - names)
    costly = {m.cell.name: m for m in of_cells(CELLS, answers_of(answers, "costly.jsonl"))}
    _save(out / "claims.json", told(left_out, tested, costly, table, taken))
    slower = [table_row(m, costly[REFERENCE], taken) for m in costly.values()]
    for name, rows_of in (("table", table), ("costly", slower)):
        _save(out / f"{name}.json", rows_of)
        write_atomically(out / f"{name}.csv", to_csv(rows_of).encode())
        write_atomically(out / f"{name}.md", markdown(rows_of).encode())
    timed = [row for row in table if row["seconds"] is not None]
    for quality in QUALITIES:
        for name, rows_of in (("", timed), ("-costly", slower)):
            save_picture(
                out / f"frontier-{quality}{name}.png", rows_of, quality, "seconds",
                "seconds an answer",
            )  # fmt: skip
        save_picture(
            out / f"compute-{quality}.png", learnt(table), quality, "training_tokens",
            "tokens of training",
        )  # fmt: skip
    return table


def _save(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True)
    return made


def main() -> int:
    print(markdown(report(parser().parse_args().out)), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
