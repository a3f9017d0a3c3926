"""Training rows and models with random weights: what every arm begins with.

    python benchmarks/tip/prepare.py --phase short:6-8:program=100,tree=100 --shape tiny-1m \\
        --labels tip=liveness-8-4 --labels round-robin=round-robin-4 --seeds 0,1,2 --out data

Writes `PHASE-LABELS.jsonl`, the same problems in the same order for all labels, and `start-SEED`, a
model for each seed, and `start-SEED-plain`, the same without registers. Problems that need more
registers than there are are
left out of all files and counted. What is there already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stretto.data.labels import Labels, Tally
from stretto.data.registers import max_live
from stretto.data.rows import Annotated
from stretto.data.store import line_of
from stretto.files import write_atomically
from stretto.models.tiny import make_tiny
from stretto.problems import ALPHABET, Problem, parse_sizes, problems
from stretto.problems.rows import rows_of

KINDS = {"tip": "", "plain": "-plain"}
"""Dialects that are trained, and how their first models' folders end."""


def labels_of(text: str) -> tuple[str, Labels]:
    """From NAME=POLICY-REGISTERS or, with slack, NAME=POLICY-REGISTERS-SLACK."""
    name, _, rest = text.partition("=")
    for policy in ("liveness", "round-robin", "random"):
        if rest.startswith(f"{policy}-"):
            numbers = [int(part) for part in rest.removeprefix(f"{policy}-").split("-")]
            return name, Labels(policy, numbers[0], slack=numbers[1] if len(numbers) > 1 else 0)
    raise SystemExit(f"labels {text!r} are none; give NAME=liveness-8-4, for one")


def drawn(sizes: str, counts: str, registers: int) -> tuple[list[Problem], int]:
    """The problems of a phase, and how many were left out."""
    every: list[Problem] = []
    for part in counts.split(","):
        task, _, number = part.partition("=")
        every += problems(task, parse_sizes(sizes), int(number), split="train")
    kept = [p for p in every if max_live(p.reads) <= registers]
    return kept, len(every) - len(kept)


def write_rows(path: Path, found: Sequence[Problem], labels: Labels) -> dict[str, object]:
    tally = Tally()
    rows = [row for _, row in rows_of(found, labels, tally)]
    if not all(isinstance(row, Annotated) for row in rows):
        raise AssertionError("a problem that fits has no labels")
    lines = (line_of(row.model_dump(exclude_none=True)) for row in rows)
    write_atomically(path, b"".join(lines))
    return tally.to_json()


def write_models(out: Path, shape: str, registers: int, seed: int) -> None:
    """`start-SEED` and `start-SEED-plain`: the same weights, but that the latter has no rows for
    registers."""
    folders = {dialect: out / f"start-{seed}{end}" for dialect, end in KINDS.items()}
    if all(folder.exists() for folder in folders.values()):
        return
    symbols = list(ALPHABET)
    tip = make_tiny(shape, symbols, dialect="tip", settings={"num_registers": registers}, seed=seed)
    plain = make_tiny(shape, symbols, seed=seed)
    weights = tip.model.state_dict()
    for name, own in plain.model.state_dict().items():
        own.copy_(weights[name][: len(own)])  # registers have the last rows
    for made in (tip, plain):
        if not folders[made.card.dialect].exists():
            made.save(folders[made.card.dialect])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", action="append", required=True, metavar="NAME:SIZES:TASK=N,...")
    parser.add_argument("--labels", action="append", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--registers", type=int, required=True)
    parser.add_argument("--seeds", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    told_at = given.out / "rows.json"
    told = json.loads(told_at.read_text()) if told_at.exists() else {}
    labels = dict(map(labels_of, given.labels))
    for phase in given.phase:
        name, sizes, counts = phase.split(":")
        missing = {
            k: v for k, v in labels.items() if not (given.out / f"{name}-{k}.jsonl").exists()
        }
        if not missing:
            continue
        found, left_out = drawn(sizes, counts, given.registers)
        for kind, own in missing.items():
            facts = write_rows(given.out / f"{name}-{kind}.jsonl", found, own)
            told[f"{name}-{kind}"] = {"phase": phase, "left_out": left_out, **facts}
            write_atomically(told_at, (json.dumps(told, indent=1) + "\n").encode())
    for seed in map(int, given.seeds.split(",")):
        write_models(given.out, given.shape, given.registers, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
