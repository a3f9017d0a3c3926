"""Renders docs/pasta-results.md from what the stages of the PASTA experiment kept.

    python benchmarks/pasta/render.py

Tables hold only what a stage wrote; a stage that is not there yet is named as missing. A test
compares the page with what this prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.files import write_atomically

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "pasta"
PAGE = HERE.parent.parent / "docs" / "pasta-results.md"
LINK = "../benchmarks/results/pasta"

INTRO = """# PASTA: what came out

One experiment, from instruction prompts to a frontier of quality against speed, on the embedded
135M model and two CPU cores. `make reproduce-pasta DATA=folder` runs its stages; each stage's
outputs and machine are in [benchmarks/results/pasta](../benchmarks/results/pasta). This page is
rendered from them by `python benchmarks/pasta/render.py`.

What it is, and is not: answers are the model's own, annotations are measured by the same model, and
quality is a **proxy**: the length-controlled log-likelihood of an answer under the base model,
against that of the baseline's answer. Preference training was scored by the same formula under
another model (Baseline-SFT), so the two judges are not independent of each other. A 135M model is
often wrong whatever the method; what is compared is methods, on the same model and the same data.
"""
VALIDATION = """## What ships

Chosen on the 80 prompts of Vicuna, which no table of results reports: of the arms that are
well-formed in at least 95 % of answers and whose win rate is not below 50 by more than its interval
the fastest by structure; if there is none, of the well-formed ones in which two
threads write at once in at least half of the answers the one of the highest win rate. Untimed. The
rate of preference training, its pairs of like length and the token limit were chosen on the same
prompts, by [trials](../benchmarks/results/pasta-trials/README.md).
"""
SCORES = """## What speed is scored by

The same candidates and judge, at a weight of 0.25, with another score of speed: `speedup` (baseline
tokens / steps, the paper's), `parallelism` (own tokens / steps), and `matched` (the fewer of both /
steps), which the other tables use. On the prompts of Vicuna; untimed.
"""
INSTRUCT = """## Instructions

Prompts of AlpacaEval that no stage saw. Speed-ups are geometric means over prompts against
Baseline-SFT decoded sequentially, all arms timed beside the same decodes of it in one run; 95 %
bootstrap intervals over prompts. `win` is the share of prompts on which the judge prefers the
answer to the baseline's, 50 being a tie.
"""
MULTIPART = """## Parts and their sum

The checkable task: four or five small questions, then the sum of their results. Models trained on
its own examples; test problems that none saw; untimed. `no-sync` is the ablation: main neither
waits for its threads nor reads them.
"""
SECTIONS = {
    "validation": (VALIDATION, "validation/compared"),
    "scores": (SCORES, "scores/compared"),
    "instruct": (INSTRUCT, "report/instruct"),
    "multipart": (MULTIPART, "report/multipart"),
}
SPEEDS = ("realized", "theoretical", "theoretical_ended", "parallelism")
QUALITIES = ("accuracy", "win_rate", "lc_win_rate", "second_win_rate")
NAMES = {
    "win_rate": "win",
    "lc_win_rate": "length-controlled win",
    "second_win_rate": "win by references",
    "cut": "cut short",
    "theoretical_ended": "theoretical where both ended",
}
REFERENCE = (
    "`win by references` is of a second judge, which has no model: it prefers the answer that is "
    "nearer, by chrF++, to one of other models' answers to the prompt, and asks for no length.\n"
)
SHARES = ("well_formed", "two_at_once", "cut", "redundant")


def render(results: Path = RESULTS) -> str:
    """The page."""
    return "\n".join([INTRO, *(line for name in SECTIONS for line in section(name, results))])


def section(name: str, results: Path) -> Iterator[str]:
    text, folder = SECTIONS[name]
    yield text
    path = results / folder / "compare.json"
    if not path.is_file():
        yield "Not measured yet.\n"
        return
    runs = json.loads(path.read_bytes())["runs"]
    second = path.parent.with_name(path.parent.name + "-reference") / path.name
    if second.is_file():
        add_second(runs, json.loads(second.read_bytes())["runs"])
    yield table(runs) + "\n"
    yield from [REFERENCE] if second.is_file() else ()
    yield from pictures(results / "report" / "plots") if name == "instruct" else ()
    yield made_by(results, folder.partition("/")[0], name) + "\n"


def add_second(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Adds the win rates of the same runs by the second judge."""
    rates = {run["run"]: run for run in others}
    for run in runs:
        for part in ("", "_low", "_high"):
            run[f"second_win_rate{part}"] = rates[run["run"]][f"win_rate{part}"]


def table(runs: list[dict[str, Any]]) -> str:
    figures = [name for name in SPEEDS if has(runs, name)]
    qualities = [name for name in QUALITIES if has(runs, name)]
    shares = [name for name in SHARES if has(runs, name)]
    columns = [*qualities, *figures]
    head = ["run", *(NAMES.get(c, c).replace("_", " ") for c in [*columns, *shares])]
    if "realized" in figures:
        head.insert(1 + len(columns), "realized / theoretical")
    lines = [head, ["---"] * len(head)]
    for run in runs:
        row = [run["run"], *(interval(run, c, 1 if c in qualities else 2) for c in columns)]
        if "realized" in figures:
            row.append(ratio(run))
        lines.append(row + [percent(run[s]) for s in shares])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def has(runs: list[dict[str, Any]], name: str) -> bool:
    return any(run.get(name) is not None for run in runs)


def interval(run: dict[str, Any], figure: str, digits: int) -> str:
    if (value := run.get(figure)) is None:
        return "–"
    low, high = run[f"{figure}_low"], run[f"{figure}_high"]
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def ratio(run: dict[str, Any]) -> str:
    realized, theoretical = run.get("realized"), run.get("theoretical")
    return f"{realized / theoretical:.2f}" if realized and theoretical else "–"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def pictures(folder: Path) -> Iterator[str]:
    for name in ("realized", "theoretical", "parallelism"):
        if (folder / f"{name}.png").is_file():
            yield f"![Quality against {name}]({LINK}/report/plots/{name}.png)\n"


def made_by(results: Path, stage: str, name: str) -> str:
    """Where the rows are and on what they were measured."""
    facts = results / stage / "stage.json"
    facts = facts if facts.is_file() else next(results.glob(f"*/{stage}.json"), facts)
    if not facts.is_file():
        return ""
    machine = json.loads(facts.read_bytes())["machine"]
    return (
        f"Rows and intervals: [{name}]({LINK}/{SECTIONS[name][1]}). {machine['cpu']}, "
        f"{machine['cores']} cores, torch {machine['versions']['torch']}."
    )


def main() -> int:
    write_atomically(PAGE, render().encode())
    print(PAGE.name, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
