"""Has the first seed learnt the problems? Accuracy and live tokens of supervised models, by task.

    python benchmarks/tip/gate.py valid-sft/dense-sft-0.jsonl valid-sft/tip-sft-0.jsonl \\
        --least 60 --out valid-sft/gate.json

Reads answers to problems of the validation split. Exits with 1 if a model is right in fewer than
`--least` percent of programs and trees: what comes after would be hours for nothing. Of answers
that are not the solution it says where they first leave it: at a value (`wrong_value`: the line is
the right one and was worked out wrongly) or at a line (`wrong_line`: it lost its place), and after
what share of the steps (`steps_right`, of all answers).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from answered import Solved, read_solved
from compared import BOTH

from stretto.bench.experiment import told
from stretto.files import write_atomically
from stretto.problems import Problem, problem
from stretto.problems.base import without_registers


def figures(rows: Sequence[Solved]) -> dict[str, dict[str, float]]:
    """By task, and of programs and trees together: means of live generated tokens and of tokens,
    the rest in percent."""
    groups = {"program+tree": BOTH, **{row.task: (row.task,) for row in rows}}
    found = {}
    for name, tasks in groups.items():
        if own := [row for row in rows if row.task in tasks]:
            found[name] = {
                "accuracy": 100 * statistics.fmean(row.is_right for row in own),
                "exact": 100 * statistics.fmean(row.is_exact for row in own),
                "live": statistics.fmean(row.generated_mean for row in own),
                "tokens": statistics.fmean(row.num_tokens for row in own),
                "cut": 100 * statistics.fmean(row.finish != "stop" for row in own),
                **faults(own),
            }
    return found


def faults(rows: Sequence[Solved]) -> dict[str, float]:
    """Where answers first leave their solutions, in percent of answers, and of steps."""
    counts = {"wrong_value": 0, "wrong_line": 0}
    right = []
    for row in rows:
        one = problem_of(row.problem)
        at = one.first_wrong(row.text)
        right.append(1.0 if at is None else at / len(one.steps))
        if at is not None:
            start, end = one.spans[at] if at < len(one.steps) else (0, 0)
            written = without_registers(row.text)[start:end]
            is_value = at < len(one.steps) and written[:-1] == one.steps[at].text[:-1]
            counts["wrong_value" if is_value else "wrong_line"] += 1
    shares = {name: 100 * count / len(rows) for name, count in counts.items()}
    return {**shares, "steps_right": 100 * statistics.fmean(right)}


def problem_of(name: str) -> Problem:
    """The problem of an id."""
    task, size, split, seed, index = name.split("-")
    return problem(task, int(size), int(index), split=split, seed=int(seed))


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """A line a model and task."""
    lines = []
    for model, by_task in found.items():
        for task, own in by_task.items():
            told_of = "  ".join(f"{name} {value:5.1f}" for name, value in own.items())
            lines.append(f"{model:14} {task:13} {told_of}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--least", type=float, default=60)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = {path.stem: figures(read_solved([path])) for path in given.answers}
    print(table(found))
    result = {"least": given.least, "models": found}
    write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    poor = [name for name, own in found.items() if own["program+tree"]["accuracy"] < given.least]
    if poor:
        print(
            f"{', '.join(poor)}: less than {given.least:g} % of programs and trees are right; "
            "train longer, or on a phase between (benchmarks/tip/sizes.py), in another work folder "
            "and with other --results",
            file=sys.stderr,
        )
    return 1 if poor else 0


if __name__ == "__main__":
    sys.exit(told(main))
