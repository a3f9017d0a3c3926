"""The report of the TIP experiment: tables, claims and plots, from what its stages kept.

    python benchmarks/tip/report.py --sizes 12-24 --longer 28-40 --out report

Reads `answers`, `policies`, `caches` and runs of training in the folder it is run in, and says in
`claims.json` of each thing that was to be shown whether it is so. Definitions: docs/results-tip.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from answered import Solved, Timed, read_solved
from compared import BOTH, Arm, claims, table_row
from pictures import save_curves, save_lengths, save_tradeoff

from stretto.bench.report import to_csv
from stretto.data.rows import read_rows
from stretto.files import write_atomically
from stretto.problems import parse_sizes
from stretto.train.loop import lines_of

SHOWN = (
    ("arm", "arm"),
    ("seeds", "seeds"),
    ("accuracy", "accuracy, %"),
    ("live", "live"),
    ("live_peak", "peak"),
    ("with_prompt", "with prompt"),
    ("slots_8", "slots, pages of 8"),
    ("reserved_mean", "reserved slots"),
    ("reserved_peak", "reserved peak"),
    ("saved", "saved, %"),
    ("tokens", "tokens"),
    ("accuracy_over_dense", "points over Dense+GRPO"),
)
ON_DENSE = "dense-grpo"


def read_arms(folder: Path) -> list[Arm]:
    """Arms of files `NAME-SEED.jsonl`, in the order of their names. One with several labels is
    several arms, `NAME as LABEL`."""
    found: dict[str, dict[str, list[Solved]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if path.name.endswith(".times.jsonl"):
            continue
        name, _, seed = path.name.removesuffix(".jsonl").rpartition("-")
        for row in read_solved([path]):
            own = name if row.label == "native" else f"{name} as {row.label}"
            found.setdefault(own, {}).setdefault(seed, []).append(row)
    return [Arm(name, seeds) for name, seeds in found.items()]


def tables(
    arms: Sequence[Arm], tasks: Iterable[str], sizes: dict[str, tuple[int, int]]
) -> dict[str, list[dict[str, Any]]]:
    """By name of tasks and sizes the rows of all arms that answered such problems."""
    groups = {task: (task,) for task in tasks}
    if set(BOTH) <= set(groups):
        groups = {"program+tree": BOTH, **groups}
    found = {}
    for text, (low, high) in sizes.items():
        for name, wanted in groups.items():
            own = [
                arm.of(lambda r, w=wanted, a=low, b=high: r.task in w and a <= r.size <= b)  # type: ignore[misc]
                for arm in arms
            ]
            reference = next((a for a in own if a.name == ON_DENSE and a.rows), None)
            rows = [table_row(arm, reference) for arm in own if arm.rows]
            if rows:
                found[f"{name}-{text}"] = rows
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The columns of `SHOWN`, figures with their intervals."""
    lines = [f"| {' | '.join(title for _, title in SHOWN)} |", "|---" * len(SHOWN) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(_cell(row, name) for name, _ in SHOWN)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if value is None or isinstance(value, str | int):
        return "" if value is None else str(value)
    if f"{name}_low" in row:
        return f"{value:.1f} ({row[f'{name}_low']:.1f}–{row[f'{name}_high']:.1f})"
    return f"{value:.1f}"


def speeds(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Tokens a second and seconds of each set of answers that was decoded together, summed."""
    found: dict[tuple[str, str], list[Timed]] = {}
    for path in sorted(p for folder in folders for p in folder.glob("*.times.jsonl")):
        for row in read_rows(path, Timed):
            name = path.name.removesuffix(".times.jsonl")
            found.setdefault((name, row.label), []).append(row)
    return [
        {
            "arm": name,
            "label": label,
            "answers": sum(row.num_answers for row in rows),
            "tokens": sum(row.num_tokens for row in rows),
            "seconds": round(sum(row.seconds for row in rows), 3),
            "tokens_per_s": round(sum(r.num_tokens for r in rows) / sum(r.seconds for r in rows)),
        }
        for (name, label), rows in found.items()
    ]


def curves() -> dict[str, list[dict[str, Any]]]:
    """Metrics of the runs of training by reward; that of the weight that was chosen is the first
    seed's of `tip-kv`."""
    paths = sorted(p for p in Path().glob("*/metrics.jsonl") if p.parent.name != "choose")
    return {path.parent.name: lines_of(path) for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--longer", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    own, baselines = read_arms(Path("answers")), read_arms(Path("policies"))
    caches = read_arms(Path("caches"))
    arms = [*own, *baselines, *caches]
    sizes = {text: parse_sizes(text) for text in (given.sizes, given.longer)}
    found = tables(arms, sorted({row.task for arm in own for row in arm.rows}), sizes)
    given.out.mkdir(parents=True, exist_ok=True)
    text = ""
    for name, rows in found.items():
        write_atomically(given.out / f"{name}.csv", to_csv(rows).encode())
        text += f"## {name}\n\n{markdown(rows)}\n"
    write_atomically(given.out / "tables.md", text.encode())
    write_atomically(given.out / "speeds.csv", to_csv(speeds([Path("answers")])).encode())
    low, high = sizes[given.sizes]
    short = {arm.name: arm.of(lambda r: low <= r.size <= high) for arm in arms}
    of_dense = {
        arm.name.partition(" as ")[2]: short[arm.name]
        for arm in baselines
        if arm.name.startswith(f"{ON_DENSE} as ")
    }
    told = claims(short, of_dense)
    write_atomically(given.out / "claims.json", (json.dumps(told, indent=1) + "\n").encode())
    save_tradeoff(given.out, found[f"program+tree-{given.sizes}"])
    save_lengths(given.out, own, high)
    save_curves(given.out, curves())
    print(text)
    for claim in told:
        print(f"{'yes' if claim['holds'] else 'NO '}  {claim['claim']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
