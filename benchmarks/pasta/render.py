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
quality is a **proxy**: the log-likelihood of an answer under the base model, its length taken out
and brevity charged, against that of the baseline's answer; scale and slope are fitted within an
arm, so arms are not on one scale to the last point. Preference training was scored by the same
formula under another model (Baseline-SFT), so the two judges are not independent of each other. A
135M model is often wrong whatever the method; what is compared is methods, on the same model. Each
annotator's arms are trained on as many rows of the same pool of answers, not on the same rows.
"""
VALIDATION = """## What ships

Chosen on the 80 prompts of Vicuna, on which no claim rests: of the arms that are
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

The first 100 prompts of AlpacaEval (59 of helpful_base, 41 of koala); no stage saw any. Speed-ups
are geometric means over prompts against Baseline-SFT decoded sequentially, all arms timed beside
the same decodes of it in one run; 95 % bootstrap intervals over prompts. `win` is the judge's mean
preference for the answer over the baseline's, 50 being a tie.

**Read the speed-ups with care.** The baseline, decoded greedily, runs in a loop to its last token
on the prompts under `baseline cut short`, and any answer that ends looks many times as fast there.
Where the baseline ended by itself (its loops left out, ours kept) and where both ended (all loops
left out) the gain is far less, and `matched`, tokens of the shorter answer by our steps, says that
much of it is shorter answers. Hardly any row that was trained on holds a `<sync/>`: where
`unjoined` is 100 %, what was measured is forks that nobody reads again.
"""
MULTIPART = """## Parts and their sum

The checkable task: four or five small questions, then the sum of their results. Models trained on
its own examples; test problems that none saw; untimed. `no-sync` is the ablation: main neither
waits for its threads nor reads them. A total can be right by luck; whether it is the sum of the
results that the answer itself has worked out cannot, and without a sync it never is.
"""
SECTIONS = {
    "validation": (VALIDATION, "validation/compared"),
    "scores": (SCORES, "scores/compared"),
    "instruct": (INSTRUCT, "report/instruct"),
    "multipart": (MULTIPART, "report/multipart"),
}
SHIPPED = "pasta-bon-0.25"
SPEEDS = (
    "realized", "realized_baseline_ended", "realized_ended", "theoretical",
    "theoretical_baseline_ended", "theoretical_ended", "matched", "parallelism",
)  # fmt: skip
QUALITIES = ("accuracy", "win_rate", "lc_win_rate", "second_win_rate")
NAMES = {
    "win_rate": "win",
    "lc_win_rate": "length-controlled win",
    "second_win_rate": "win by references",
    "cut": "cut short",
    "realized_baseline_ended": "realized where the baseline ended",
    "realized_ended": "realized where both ended",
    "theoretical_baseline_ended": "theoretical where the baseline ended",
    "theoretical_ended": "theoretical where both ended",
    "baseline_cut": "baseline cut short",
    "sums_own_results": "adds up its own results",
}
REFERENCE = (
    "`win by references` is of a second judge, which has no model: it prefers the answer that is "
    "nearer, by chrF++, to one of other models' answers to the prompt, and asks for no length.\n"
)
SHARES = (
    "parts_right", "sums_own_results", "well_formed", "two_at_once", "cut", "baseline_cut",
    "redundant", "unjoined",
)  # fmt: skip


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
    yield from goals(runs) if name == "instruct" else ()
    yield made_by(results, folder.partition("/")[0], name) + "\n"


def goals(runs: list[dict[str, Any]]) -> Iterator[str]:
    """What was aimed at, and what came out."""
    by_name = {run["run"]: run for run in runs}
    if SHIPPED not in by_name:
        return
    own, trained = by_name[SHIPPED], [run for run in runs if run["run"].startswith("pasta-bon")]
    best = max(trained, key=lambda run: run["win_rate"])
    fast = max((run for run in runs if run["well_formed"]), key=lambda run: run["realized"])
    forks = [percent(by_name[name]["redundant"]) for name in ("pasta-sft", SHIPPED)]
    lines = [
        (own["well_formed"] >= 0.97, "well-formed in 97 %", percent(own["well_formed"])),
        (own["two_at_once"] >= 0.5, "two threads at once in half", percent(own["two_at_once"])),
        (own["realized"] / own["theoretical"] >= 0.85, "realized / theoretical 0.85", ratio(own)),
        (
            own["realized"] >= 1.62 and own["win_rate_high"] >= 50,
            "1.62 times as fast at a small loss of quality",
            f"{interval(own, 'realized', 2)}, win {interval(own, 'win_rate', 1)}",
        ),
        (
            fast["realized"] >= 1.93,
            "1.93 times as fast at the fast end",
            f"{fast['run']} {interval(fast, 'realized', 2)}",
        ),
        (
            best["win_rate_high"] >= 50,
            "the arm of the best quality no worse than the baseline",
            f"{best['run']}, win {interval(best, 'win_rate', 1)}, by references "
            f"{interval(best, 'second_win_rate', 1)}",
        ),
    ]
    yield f"Held against what was aimed at (`{SHIPPED}` ships):\n"
    yield from (
        f"- {'met' if is_met else '**missed**'}: {goal}: {what}" for is_met, goal, what in lines
    )
    yield (
        f"- redundant branches before and after preference training: {forks[0]}, {forks[1]}\n\n"
        f"Each arm paired with APAR: [against-apar]({LINK}/report/against-apar).\n"
    )


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
