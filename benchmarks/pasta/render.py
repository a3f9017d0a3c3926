"""Renders docs/pasta-results.md from what the stages of the PASTA experiment kept.

    python benchmarks/pasta/render.py

Tables hold only what a stage wrote; a stage that is not there yet is named as missing. A test
compares the page with what this prints.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.bench.experiment import told
from stretto.errors import InvalidInput
from stretto.eval.folder import read_json
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
quality is a **proxy**: the log-likelihood of an answer under the base model against that of the
baseline's answer, its length taken out and brevity charged, on one scale for all arms of a table.
`win` is the mean of these preferences, which are tanh of a difference in standard deviations: 50 is
a tie, and it is no share of prompts, which `won` is. What is charged for brevity weighs much in it;
`win, brevity not charged` shows how much. Preference training was scored by the same formula under
another model (Baseline-SFT), so the two judges are not independent of each other. A 135M model is
often wrong whatever the method; what is compared is methods, on the same model. Each annotator's
arms are trained on as many rows of the same pool of answers, not on the same rows.
"""
ARMS = {
    "the baseline": "Baseline-SFT: trained on the rows of `pasta-sft` without their promises, "
    "decoded one token at a time; what every figure is held against",
    "`sot`": "the baseline's weights, decoded by Skeleton-of-Thought",
    "`apar`": "dialect `apar`, trained on rows that its published rules annotated",
    "`pasta-structure`": "dialect `pasta`, trained on rows annotated by their form",
    "`pasta-sft`": "dialect `pasta`, trained on rows annotated by measured likelihood",
    "`pasta-bon-λ`": "`pasta-sft` after a round of preference training on its own answers, scored "
    "by speed (`matched`) + λ · quality: λ 0 is speed alone, `inf` quality alone",
    "`pasta-bon-0.25`": "of these the one that ships, as `smollm2-135m-pasta`",
    "`pasta-bon-4-r2`": "`pasta-bon-4` after a second round, on answers of its own",
    "`pasta-bon-0.25-speedup`, `-parallelism`": "`pasta-bon-0.25` with another score of speed",
}
"""What each run in the tables is."""
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
the same decodes of it in one run; 95 % bootstrap intervals over prompts. `end to end` counts the
passes over prompts too, of which SoT has the most: it asks with prompts of its own, for 3 to 6
points of two sentences, and decodes plainly where its outline has fewer than two points.

**Read the speed-ups with care.** The baseline, decoded greedily, runs in a loop to its last token
on the prompts under `baseline cut short`, and any answer that ends looks many times as fast there.
Where the baseline ended by itself (its loops left out, ours kept) and where both ended (all loops
left out) the gain is far less, and `matched`, tokens of the shorter answer by our steps, says that
much of it is shorter answers. Win rates ride on the loops as well, above all `win by references`:
read them where the baseline ended. Hardly any row that was trained on holds a `<sync/>`: where
`unjoined` is 100 %, what was measured is forks that nobody reads again.
"""
PENALISED = """## Instructions, with a repetition penalty

The same prompts, arms and timing, with a repetition penalty for all sides, so that hardly an answer
runs in a loop to its last token. It was chosen by the baseline alone, on the prompts of Vicuna: the
least of those tried under which at least 95 % of its answers end, or the one under which most do.
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
    "penalised": (PENALISED, "report/penalised"),
    "multipart": (MULTIPART, "report/multipart"),
}
TIMED = {"instruct": "eval", "penalised": "eval-penalised"}
SHIPPED = "pasta-bon-0.25"
SECOND = "second_"
SPLIT = ("win_rate", "win_rate_baseline_ended", "win_rate_baseline_cut")
QUALITIES = (
    "accuracy", "win_rate", "win_rate_no_brevity", "wins", "lc_win_rate", *SPLIT[1:],
    *(SECOND + name for name in SPLIT),
)  # fmt: skip
SPEEDS = (
    "realized", "realized_baseline_ended", "realized_ended", "end_to_end", "theoretical",
    "theoretical_baseline_ended", "theoretical_ended", "efficiency", "matched", "parallelism",
)  # fmt: skip
RIGHT = ("parts_right", "sums_own_results")
SHARES = ("well_formed", "two_at_once", "cut", "baseline_cut", "redundant", "unjoined")
TABLES = ((QUALITIES, 1, RIGHT), (SPEEDS, 2, SHARES))
"""Of each table the figures with intervals, their digits, and the shares."""
NAMES = {
    "win_rate": "win",
    "win_rate_no_brevity": "win, brevity not charged",
    "wins": "won",
    "lc_win_rate": "length-controlled win",
    "win_rate_baseline_ended": "win where the baseline ended",
    "win_rate_baseline_cut": "win where it was cut short",
    "second_win_rate": "win by references",
    "second_win_rate_baseline_ended": "by references where the baseline ended",
    "second_win_rate_baseline_cut": "by references where it was cut short",
    "cut": "cut short",
    "realized_baseline_ended": "realized where the baseline ended",
    "realized_ended": "realized where both ended",
    "theoretical_baseline_ended": "theoretical where the baseline ended",
    "theoretical_ended": "theoretical where both ended",
    "efficiency": "realized / theoretical",
    "baseline_cut": "baseline cut short",
    "sums_own_results": "adds up its own results",
}
REFERENCE = (
    "`win by references` is of a second judge, which has no model: it prefers the answer that is "
    "nearer, by chrF++, to one of other models' answers to the prompt, and asks for no length.\n"
)


def render(results: Path = RESULTS) -> str:
    """The page."""
    sections = (line for name in SECTIONS for line in section(name, results))
    return "\n".join([INTRO, *arms(), *sections])


def arms() -> Iterator[str]:
    """What the runs are, before the first table of them."""
    lines = ["| run | is |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in ARMS.items())]
    yield "\n".join(lines) + "\n"


def section(name: str, results: Path) -> Iterator[str]:
    text, folder = SECTIONS[name]
    yield text
    path = results / folder / "compare.json"
    if not path.is_file():
        yield "Not measured yet.\n"
        return
    yield from penalties(results / "penalty" / "chosen.json") if name == "penalised" else ()
    try:
        yield from shown(name, path, results)
    except KeyError as error:
        raise InvalidInput(f"{path} lacks {error}; run stretto eval compare again") from None
    yield made_by(results, folder.partition("/")[0], name) + "\n"


def shown(name: str, path: Path, results: Path) -> Iterator[str]:
    """The tables of a comparison, and what goes with them in this section."""
    compared = read(path)
    runs = compared["runs"]
    second = path.parent.with_name(path.parent.name + "-reference") / path.name
    if second.is_file():
        add_second(runs, read(second)["runs"])
    for parts in TABLES:
        yield from table(runs, *parts)
        yield from [REFERENCE] if second.is_file() and parts[0] is QUALITIES else ()
    if name == "instruct":
        yield from pictures(results / "report" / "plots")
        yield from goals(runs)
    if name == "multipart":
        yield from sum_goals(compared)


def penalties(path: Path) -> Iterator[str]:
    """What was tried and chosen."""
    if not path.is_file():
        return
    found = read_json(path)
    tried = ", ".join(f"{row['penalty']:g}: {row['ended']:.0f} %" for row in found["rows"])
    yield f"Answers that end, by penalty: {tried}. Chosen: {found['penalty']:g}.\n"


def read(path: Path) -> dict[str, Any]:
    """A comparison. Raises `InvalidInput` for a file that holds none."""
    found = read_json(path)
    runs = found.get("runs") if isinstance(found, dict) else None
    if not isinstance(runs, list) or not all(isinstance(r, dict) and "run" in r for r in runs):
        raise InvalidInput(f"{path} is not what stretto eval compare writes; write it again")
    return dict(found)


def goals(runs: list[dict[str, Any]]) -> Iterator[str]:
    """What was aimed at, and what came out."""
    by_name = {run["run"]: run for run in runs}
    if SHIPPED not in by_name:
        return
    own, trained = by_name[SHIPPED], [run for run in runs if run["run"].startswith("pasta-bon")]
    best = max(trained, key=lambda run: run["win_rate"])
    fast = max((run for run in runs if run["well_formed"]), key=lambda run: run["realized"])
    lines = [
        (own["well_formed"] >= 0.97, "well-formed in 97 %", percent(own["well_formed"])),
        (own["two_at_once"] >= 0.5, "two threads at once in half", percent(own["two_at_once"])),
        (own["efficiency"] >= 0.85, "realized / theoretical 0.85", interval(own, "efficiency", 2)),
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
            f"{best['run']}, win {interval(best, 'win_rate', 1)}, won {interval(best, 'wins', 1)}, "
            f"by references {interval(best, 'second_win_rate', 1)}",
        ),
    ]
    yield f"Held against what was aimed at (`{SHIPPED}` ships):\n"
    yield from (kept(*line) for line in lines)
    yield from beside(by_name)
    yield f"\nEach arm paired with APAR: [against-apar]({LINK}/report/against-apar).\n"


def beside(by_name: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What is to be counted, or shown side by side, and has no goal."""
    before, after = (percent(by_name[name]["redundant"]) for name in ("pasta-sft", SHIPPED))
    yield f"- redundant branches before and after preference training: {before}, {after}"
    told = [
        f"{what} {interval(run, 'realized_baseline_ended', 2)} times as fast where the baseline "
        f"ended, win {interval(run, 'win_rate', 1)}, well-formed {percent(run['well_formed'])}"
        for what, name in (("measured likelihood", "pasta-sft"), ("structure", "pasta-structure"))
        if (run := by_name.get(name)) is not None
    ]
    yield f"- annotators side by side, after supervised training alone: {'; '.join(told)}"


def sum_goals(compared: dict[str, Any]) -> Iterator[str]:
    """The goal of the task of parts and their sum."""
    lost = next(
        (line for line in compared.get("paired", ())
         if (line["run"], line["figure"]) == ("eval-multipart-pasta", "accuracy")), None
    )  # fmt: skip
    if lost is None:
        return
    run = next(run for run in compared["runs"] if run["run"] == lost["run"])
    goal = "accuracy within 2 points of sequential decoding in half the steps"
    what = "{value:+.1f} points ({low:+.1f} to {high:+.1f})".format(**lost)
    is_met = lost["value"] >= -2 and run["theoretical"] >= 2
    yield "Held against what was aimed at:\n"
    yield kept(is_met, goal, f"{what}, {interval(run, 'theoretical', 2)} times fewer steps") + "\n"


def kept(is_met: bool, goal: str, what: str) -> str:
    return f"- {'met' if is_met else '**missed**'}: {goal}: {what}"


def add_second(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Adds the win rates of the same runs by the second judge."""
    rates = {run["run"]: run for run in others}
    for run in runs:
        for name in (f"{figure}{part}" for figure in SPLIT for part in ("", "_low", "_high")):
            run[SECOND + name] = rates.get(run["run"], {}).get(name)


def table(
    runs: list[dict[str, Any]], figures: tuple[str, ...], digits: int, shares: tuple[str, ...]
) -> Iterator[str]:
    """A row a run, of what any run has; nothing if none has any."""
    figures, shares = (tuple(n for n in names if has(runs, n)) for names in (figures, shares))
    if not figures and not shares:
        return
    head = ["run", *(NAMES.get(name, name).replace("_", " ") for name in (*figures, *shares))]
    lines = [head, ["---"] * len(head)]
    for run in runs:
        own = [interval(run, name, digits) for name in figures]
        lines.append([run["run"], *own, *(percent(run.get(name)) for name in shares)])
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def has(runs: list[dict[str, Any]], name: str) -> bool:
    return any(run.get(name) is not None for run in runs)


def interval(run: dict[str, Any], figure: str, digits: int) -> str:
    if (value := run.get(figure)) is None:
        return "–"
    low, high = run[f"{figure}_low"], run[f"{figure}_high"]
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def pictures(folder: Path) -> Iterator[str]:
    for name in ("realized", "theoretical", "parallelism"):
        if (folder / f"{name}.png").is_file():
            yield f"![Quality against {name}]({LINK}/report/plots/{name}.png)\n"


def made_by(results: Path, stage: str, name: str) -> str:
    """Where the rows are and on what they were measured."""
    pace = pace_of(results / TIMED[name]) if name in TIMED else ""
    facts = results / stage / "stage.json"
    facts = facts if facts.is_file() else next(results.glob(f"*/{stage}.json"), facts)
    if not facts.is_file():
        return ""
    machine = read_json(facts)["machine"]
    return (
        f"Rows and intervals: [{name}]({LINK}/{SECTIONS[name][1]}). {machine['cpu']}, "
        f"{machine['cores']} cores, torch {machine['versions']['torch']}.{pace}"
    )


def pace_of(folder: Path) -> str:
    """What was timed on, and how evenly the machine ran: the baseline's time a token, which depends
    on little else."""
    rows, config = folder / SHIPPED / "rows.jsonl.gz", folder / SHIPPED / "config.json"
    if not rows.is_file() or not config.is_file():
        return ""
    place = read_json(config)["place"]
    try:
        lines = gzip.decompress(rows.read_bytes()).splitlines()
        sides = [json.loads(line)["baseline"] for line in lines]
        paces = [1000 * side["decode_s"][0] / side["drawn_tokens"] for side in sides if side]
    except (OSError, EOFError, ValueError, LookupError, zlib.error) as error:
        raise InvalidInput(f"{rows} holds no timed rows ({error}); put it back") from None
    return (
        f" Engine {place['engine']}, {place['dtype']}. The machine was shared: the baseline took "
        f"{statistics.median(paces):.1f} ms a token in the median of prompts, and from "
        f"{min(paces):.1f} to {max(paces):.1f}; all sides of a prompt were timed one after another."
    )


def main() -> int:
    write_atomically(PAGE, render().encode())
    print(PAGE.name, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
