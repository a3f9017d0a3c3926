"""The report of the TIP experiment: tables, claims and plots, from what its stages kept.

    python benchmarks/tip/report.py --sizes 20-28 --longer 32-40 --out report

Reads `answers-*`, `policies-*`, `caches-*`, what speed was measured and runs of training in the
folder it is run in, and says in `claims.json` of each thing that was to be shown whether it is so;
in `figures.json` is what nothing was claimed of. Definitions: docs/tip-experiment.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from answered import Solved, Timed
from claims import claims, figures, speed_claims
from compared import BOTH, Arm, table_row
from pictures import save_curves, save_lengths, save_tradeoff

from stretto.bench.experiment import told
from stretto.bench.pairs import rounded
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
    ("slots_9", "slots, pages of 9"),
    ("reserved_mean", "reserved slots"),
    ("reserved_peak", "reserved peak"),
    ("saved", "saved, %"),
    ("tokens", "tokens"),
    ("tokens_per_s", "tokens/s"),
    ("decode_s", "seconds"),
    ("accuracy_over_dense", "points over Dense+GRPO"),
)
ON_DENSE = "dense-grpo"
SPEED = ("throughput", "crowd", "long-context")
"""Folders of what speed was measured."""
ENDS = {Solved: ".jsonl", Timed: ".times.jsonl"}
R = TypeVar("R", Solved, Timed)


def read_by_arm(folders: Iterable[Path], row: type[R]) -> dict[str, dict[str, list[R]]]:
    """Rows of files `NAME-SEED`, by arm and seed, in the order of their names. A file with several
    labels is several arms, `NAME as LABEL`."""
    found: dict[str, dict[str, list[R]]] = {}
    for path in sorted(p for folder in folders for p in folder.glob(f"*{ENDS[row]}")):
        if row is Solved and path.name.endswith(ENDS[Timed]):
            continue
        name, _, seed = path.name.removesuffix(ENDS[row]).rpartition("-")
        for one in read_rows(path, row):
            own = name if one.label == "native" else f"{name} as {one.label}"
            found.setdefault(own, {}).setdefault(seed, []).append(one)
    return found


def read_arms(folders: Iterable[Path]) -> list[Arm]:
    return [Arm(name, seeds) for name, seeds in read_by_arm(folders, Solved).items()]


Times = dict[str, dict[str, list[Timed]]]
"""Sets that were decoded together, by arm and seed."""


def tables(
    arms: Sequence[Arm], times: Times, tasks: Iterable[str], sizes: dict[str, tuple[int, int]]
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
            cells = {f"{task}/{text}" for task in wanted}
            rows = [
                table_row(arm, reference) | speed_of(times.get(arm.name, {}), cells)
                for arm in own
                if arm.rows
            ]
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


def speed_of(times: Mapping[str, Sequence[Timed]], cells: Container[str]) -> dict[str, Any]:
    """Tokens a second of an arm's sets of such problems, and the seconds that they took a seed."""
    every = [t for rows in times.values() for t in rows if t.part.rpartition("/")[0] in cells]
    seconds = sum(t.seconds for t in every)
    if not seconds:
        return {"tokens_per_s": None, "decode_s": None}
    tokens = sum(t.num_tokens for t in every)
    return rounded({"tokens_per_s": tokens / seconds, "decode_s": seconds / len(times)})


def speeds(times: Times) -> list[dict[str, Any]]:
    """Tokens a second and seconds of all sets of an arm and seed."""
    return [
        {
            "arm": arm,
            "seed": seed,
            "answers": sum(row.num_answers for row in rows),
            "tokens": sum(row.num_tokens for row in rows),
            "seconds": round(sum(row.seconds for row in rows), 3),
            "tokens_per_s": round(sum(r.num_tokens for r in rows) / sum(r.seconds for r in rows)),
        }
        for arm, seeds in times.items()
        for seed, rows in seeds.items()
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
    root = Path()
    folders = [sorted(root.glob(f"{name}*")) for name in ("answers-", "policies-", "caches-")]
    own, baselines, caches = (read_arms(found) for found in folders)
    times = read_by_arm([path for found in folders for path in found], Timed)
    sizes = {text: parse_sizes(text) for text in (given.sizes, given.longer)}
    tasks = sorted({row.task for arm in own for row in arm.rows})
    found = tables([*own, *baselines, *caches], times, tasks, sizes)
    given.out.mkdir(parents=True, exist_ok=True)
    text = ""
    for name, rows in found.items():
        write_atomically(given.out / f"{name}.csv", to_csv(rows).encode())
        text += f"## {name}\n\n{markdown(rows)}\n"
    write_atomically(given.out / "tables.md", text.encode())
    write_atomically(given.out / "speeds.csv", to_csv(speeds(times)).encode())
    verdicts, rest = said(own, baselines, caches, sizes[given.sizes], sizes[given.longer])
    for name, value in (("claims", verdicts), ("figures", rest)):
        write_atomically(given.out / f"{name}.json", (json.dumps(value, indent=1) + "\n").encode())
    save_tradeoff(given.out, found[f"program+tree-{given.sizes}"])
    save_lengths(given.out, own, sizes[given.sizes][1])
    save_curves(given.out, curves())
    print(text)
    for claim in verdicts:
        print(f"{VERDICTS[claim['holds']]}  {claim['claim']}", file=sys.stderr)
    return 0


VERDICTS = {True: "yes      ", False: "NO       ", None: "undecided"}


def said(
    own: Sequence[Arm],
    baselines: Sequence[Arm],
    caches: Sequence[Arm],
    sizes: tuple[int, int],
    longer: tuple[int, int],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Claims, and figures that nothing was claimed of."""

    def within(arms: Sequence[Arm], low: int, high: int) -> dict[str, Arm]:
        kept = [arm.of(lambda r: low <= r.size <= high) for arm in arms]
        return {arm.name: arm for arm in kept if arm.rows}

    trained, beyond = within(own, *sizes), within(own, *longer)
    start = f"{ON_DENSE} as "
    of_dense = {
        name.removeprefix(start): Arm(name.removeprefix(start), arm.seeds)
        for name, arm in within(baselines, *sizes).items()
        if name.startswith(start)
    }
    speed = {name: json.loads((Path(name) / "result.json").read_bytes()) for name in SPEED}
    return (
        [
            *claims(trained, beyond, of_dense),
            *speed_claims(speed["crowd"], speed["long-context"]),
        ],
        figures(trained, within(caches, *sizes), beyond, speed),
    )


if __name__ == "__main__":
    sys.exit(told(main))
