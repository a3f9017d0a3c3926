"""Training rows, and the model with random weights that everything begins with.

    python benchmarks/tip/prepare.py --base short:6-8:program=100 --phase whole:20-22:tree=100 \\
        --labels tip=liveness-8-1 --labels in-turn=round-robin-5 --shape tiny-1m --registers 8 \\
        --out data

Writes `PHASE-LABELS.jsonl`, the same problems in the same order for all labels; `BASE.jsonl`, of
which responses alone are meant; and `start`, a model without registers. Problems that need more
registers than there are are left out of all files and counted. What is there already is left as it
is; a folder that was begun with other problems, labels or models is refused (`settings.json`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.bench.experiment import told
from stretto.data.labels import Labels, Tally
from stretto.data.registers import max_live
from stretto.data.rows import Annotated
from stretto.data.settings import hold_to
from stretto.data.store import line_of
from stretto.errors import InvalidInput
from stretto.files import write_atomically
from stretto.models.tiny import new_tiny
from stretto.problems import ALPHABET, Problem, parse_sizes, problems
from stretto.problems.draw import VERSION
from stretto.problems.rows import rows_of


def labels_of(text: str) -> tuple[str, Labels]:
    """From NAME=POLICY-REGISTERS or, with slack, NAME=POLICY-REGISTERS-SLACK; `-shifted` after
    either. Raises `InvalidInput`."""
    known = "liveness|stack|round-robin|random"
    form = re.fullmatch(rf"([^=]+)=({known})-([0-9]{{1,3}})(?:-([0-9]{{1,3}}))?(-shifted)?", text)
    if form is None:
        raise InvalidInput(f"labels {text!a} are none; give NAME=liveness-8-1, for one")
    name, policy, registers, slack, shifted = form.groups()
    slack = int(slack or 0)
    return name, Labels(policy, int(registers), slack=slack, shifted=bool(shifted))


def phase_of(text: str) -> tuple[str, str, str]:
    """From NAME:SIZES:TASK=N,...: name, sizes, counts. Raises `InvalidInput`."""
    if not re.fullmatch(r"[^:]+:[^:]+:\w+=[0-9]{1,7}(,\w+=[0-9]{1,7})*", text):
        raise InvalidInput(f"phase {text!a} is none; give NAME:6-10:program=100,tree=100, for one")
    name, sizes, counts = text.split(":")
    return name, sizes, counts


def drawn(sizes: str, counts: str, registers: int) -> tuple[list[Problem], int]:
    """The problems of a phase, and how many were left out."""
    every: list[Problem] = []
    for part in counts.split(","):
        task, _, number = part.partition("=")
        every += problems(task, parse_sizes(sizes), int(number), split="train")
    kept = [p for p in every if max_live(p.reads) <= registers]
    return kept, len(every) - len(kept)


def labelled(found: Sequence[Problem], labels: Labels) -> tuple[bytes, dict[str, object]]:
    """The lines of a file of rows, and what there is to tell of them."""
    tally = Tally()
    rows = [row for _, row in rows_of(found, labels, tally)]
    if not all(isinstance(row, Annotated) for row in rows):
        raise AssertionError("a problem that fits has no labels")
    lines = (line_of(row.model_dump(exclude_none=True)) for row in rows)
    return b"".join(lines), tally.to_json()


def write_phase(out: Path, phase: str, labels: Mapping[str, Labels], registers: int) -> None:
    """The files of a phase that are not there, of each first what `rows.json` tells of it."""
    name, sizes, counts = phase_of(phase)
    missing = {k: v for k, v in labels.items() if not (out / f"{name}-{k}.jsonl").exists()}
    found, left_out = drawn(sizes, counts, registers) if missing else ([], 0)
    told_at = out / "rows.json"
    facts = json.loads(told_at.read_text()) if told_at.exists() else {}
    for kind, own in missing.items():
        lines, tally = labelled(found, own)
        facts[f"{name}-{kind}"] = {"phase": phase, "left_out": left_out, **tally}
        write_atomically(told_at, (json.dumps(facts, indent=1) + "\n").encode())
        write_atomically(out / f"{name}-{kind}.jsonl", lines)


def write_base(out: Path, phase: str, registers: int) -> None:
    """The rows of a phase that is learnt without registers."""
    name, sizes, counts = phase_of(phase)
    path = out / f"{name}.jsonl"
    if not path.exists():
        found, _ = drawn(sizes, counts, registers)
        lines, _ = labelled(found, Labels("round-robin", registers))
        write_atomically(path, lines)


def hold(given: argparse.Namespace) -> None:
    """Raises `InvalidInput` if the folder was begun otherwise."""
    names = ("base", "phase", "labels", "shape", "registers")
    settings = {name: getattr(given, name) for name in names}
    hold_to(
        given.out / "settings.json",
        {"problems": VERSION, **settings},
        str(given.out),
        has_rows=any(given.out.glob("*.jsonl")) or (given.out / "start").exists(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", action="append", default=[], metavar="NAME:SIZES:TASK=N,...")
    parser.add_argument("--phase", action="append", required=True, metavar="NAME:SIZES:TASK=N,...")
    parser.add_argument("--labels", action="append", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--registers", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    labels = dict(map(labels_of, given.labels))
    for phase in (*given.base, *given.phase):
        phase_of(phase)  # before the folder is held to it
    given.out.mkdir(parents=True, exist_ok=True)
    hold(given)
    for phase in given.phase:
        write_phase(given.out, phase, labels, given.registers)
    for phase in given.base:
        write_base(given.out, phase, given.registers)
    if not (given.out / "start").exists():
        new_tiny(given.out / "start", given.shape, list(ALPHABET))
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
