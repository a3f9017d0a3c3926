"""Skeleton-of-Thought against sequential decoding of the same weights, over a file of prompts.

    python benchmarks/sot_compare.py --out benchmarks/results/sot

For each prompt this runs what `stretto run PROMPT --method sot --compare --json` runs and appends a
line to `rows.jsonl` at once. The same command goes on where a killed one stopped. At the end it
writes `summary.csv` (a line a prompt), `means.csv`, `plot.png` and, last, `run.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.bench.machine import describe_machine
from stretto.bench.report import format_table, prepare_folder, to_csv, write_atomically
from stretto.errors import InvalidInput, StrettoError

if TYPE_CHECKING:
    from stretto.lm import LM

PROMPTS = Path(__file__).parent / "prompts" / "twenty.txt"
DEV_PROMPTS = [
    "Give me tips for learning to cook.",
    "What are the benefits of walking every day?",
    "How do I prepare for a job interview?",
    "Why is the sky blue?",
    "Explain how a bicycle works.",
    "What should I pack for a beach holiday?",
    "How can a small shop attract more customers?",
    "What is the capital of France?",
    "Describe the life of a honey bee.",
    "How do I take care of a house plant?",
    "What are the causes of the First World War?",
    "Write a short poem about rain.",
]
"""The wordings of method `sot` were chosen on these; no figure is reported on them."""

FIGURES = ("steps_per_token", "theoretical", "realized")
MANY_POINTS = 3
NUM_RESAMPLES = 10_000
DEFINITIONS = {
    "points": "threads forked by the outline; 0 where the outline held no list of two points",
    "sequential_steps": "step of the last token that any thread drew, the outline's included",
    "completion_tokens": "drawn tokens with at least one character in the final text",
    "steps_per_token": "sequential_steps / completion_tokens",
    "theoretical": "tokens of the sequential baseline's response / sequential_steps",
    "realized": "baseline's decode time / decode time, same engine and process, warm, the two "
    "alternating; median over pairs",
    "means": "geometric mean over prompts, 95% interval by the percentile bootstrap over prompts",
    "failures": "prompts that ended in an error; counted, and in no mean",
    "left_out": "answers without a positive figure, in no mean of that figure",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        prepare_folder(options.out)
        prompts = _read_prompts(options.prompts)[: options.limit]
        settings = {
            "model": options.model,
            "max_tokens": options.max_tokens,
            "pairs": options.pairs,
            "dtype": options.dtype,
        }
        rows = _measure(prompts, settings, options.out / "rows.jsonl")
        _report(rows, settings, options)
    except StrettoError as error:
        print(f"sot_compare: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 3 if any("error" in row for row in rows) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="one prompt a line")
    parser.add_argument("--pairs", type=int, default=3, help="measured pairs a prompt")
    parser.add_argument("--model", default=None, help="default: the embedded model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--limit", type=int, default=None, help="only the first prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap; decoding is greedy")
    return parser.parse_args(arguments)


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read prompts from {str(path)!r} ({error})") from None
    return [line for line in lines if line.strip()]


def _measure(prompts: list[str], settings: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Rows of all prompts in order, those already in the file not run again."""
    done = _finished(path, settings)
    lm = None
    for number, prompt in enumerate(prompts, 1):
        key = _sha256(prompt)
        if key in done:
            continue
        lm = lm or _load(settings)
        start = time.perf_counter()
        row = {"prompt": number, "sha256": key, "settings": settings, **_run(lm, prompt, settings)}
        row["wall_s"] = time.perf_counter() - start
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        done[key] = row
        print(f"{number}/{len(prompts)} {row['wall_s']:.0f} s", file=sys.stderr, flush=True)
    return [done[_sha256(prompt)] for prompt in prompts]


def _finished(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows already there, by the prompt's hash; a torn last line is cut off the file."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        write_atomically(path, whole)
    rows = [json.loads(line) for line in whole.decode().split("\n") if line]
    for row in rows:
        if row["settings"] != settings:
            raise InvalidInput(
                f"{str(path)!r} was measured with {row['settings']}, got {settings}; "
                "name another --out"
            )
    return {row["sha256"]: row for row in rows}


def _load(settings: dict[str, Any]) -> LM:
    from stretto.lm import LM

    return LM.load(settings["model"], dtype=settings["dtype"])


def _run(lm: LM, prompt: str, settings: dict[str, Any]) -> dict[str, Any]:
    from stretto.comparison import compare
    from stretto.params import SamplingParams

    params = SamplingParams(max_tokens=settings["max_tokens"])
    try:
        ours, baseline = compare(lm, prompt, params, method="sot", pairs=settings["pairs"])
    except StrettoError as error:
        return {"error": str(error)}
    return {"sot": ours.to_json(), "sequential": baseline.to_json()}


def _report(
    rows: list[dict[str, Any]], settings: dict[str, Any], options: argparse.Namespace
) -> None:
    summary = [_summary(row) for row in rows]
    means = [mean for group in _groups(summary) for mean in _means(*group, options.seed)]
    if summary:
        write_atomically(options.out / "summary.csv", to_csv(summary).encode())
        write_atomically(options.out / "means.csv", to_csv(means).encode())
        write_atomically(options.out / "plot.png", _plot(summary))
    many = [s for s in summary if (s["points"] or 0) >= MANY_POINTS]
    run = {
        "command": shlex.join(["python", *sys.argv]),
        "settings": settings,
        "seed": options.seed,
        "prompts": len(rows),
        "failures": sum("error" in row for row in rows),
        "with_3_points_or_more": len(many),
        "of_these_below_0.8_steps_per_token": sum(s["steps_per_token"] < 0.8 for s in many),
        "means": means,
        "definitions": DEFINITIONS,
        "machine": describe_machine(),
    }
    text = json.dumps(run, ensure_ascii=False, indent=2) + "\n"
    write_atomically(options.out / "run.json", text.encode())
    print(format_table(summary), format_table(means), sep="\n\n")


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """One line of the table; figures None for a failed prompt."""
    ours, baseline = row.get("sot"), row.get("sequential")
    usage = ours["usage"] if ours else {}
    tokens, steps = usage.get("completion_tokens"), usage.get("sequential_steps")
    return {
        "prompt": row["prompt"],
        "sha256": row["sha256"][:12],
        "points": len(ours["threads"]) - 1 if ours else None,
        "finish_reason": ours["finish_reason"] if ours else "error",
        "sequential_steps": steps,
        "completion_tokens": tokens,
        "baseline_tokens": baseline["usage"]["completion_tokens"] if baseline else None,
        "capped_threads": usage.get("capped_threads"),
        "steps_per_token": steps / tokens if tokens else None,
        "theoretical": ours["speedup"]["theoretical"] if ours else None,
        "realized": ours["speedup"]["realized"] if ours else None,
    }


def _groups(summary: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    many = [row for row in summary if (row["points"] or 0) >= MANY_POINTS]
    return [("all", summary), (f"{MANY_POINTS} points or more", many)]


def _means(group: str, rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Geometric means of a group's figures with bootstrap intervals over prompts."""
    import numpy as np

    means = []
    for figure in FIGURES:
        values = [row[figure] for row in rows if row[figure]]
        mean = low = high = None
        if values:
            logs = np.log(values)
            rng = np.random.default_rng(seed)
            resampled = logs[rng.integers(len(logs), size=(NUM_RESAMPLES, len(logs)))].mean(axis=1)
            low, high = (math.exp(v) for v in np.percentile(resampled, [2.5, 97.5]))
            mean = math.exp(logs.mean())
        means.append(
            {
                "group": group,
                "figure": figure,
                "prompts": len(values),
                "left_out": len(rows) - len(values),
                "geometric_mean": mean,
                "low": low,
                "high": high,
            }
        )
    return means


def _plot(summary: list[dict[str, Any]]) -> bytes:
    """Realized against theoretical speed-up, a dot a prompt, by whether there were points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="theoretical speed-up", ylabel="realized speed-up")
    for label, marker, is_many in (("3 points or more", "o", True), ("fewer", "x", False)):
        rows = [r for r in summary if r["realized"] and (r["points"] >= MANY_POINTS) == is_many]
        axes.scatter(
            [r["theoretical"] for r in rows],
            [r["realized"] for r in rows],
            marker=marker,
            label=f"{label} ({len(rows)} prompts)",
        )
    axes.axhline(1, linestyle="--", color="gray")
    axes.axline((1, 1), slope=1, linestyle=":", color="gray", label="realized = theoretical")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
