"""A method against sequential decoding of the same weights, over a file of prompts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.bench.pairs import NUM_RESAMPLES, Report
from stretto.errors import InvalidInput, StrettoError
from stretto.params import SamplingParams

if TYPE_CHECKING:
    from stretto.bench.journal import Cell, Journal
    from stretto.lm import LM

FIGURES = ("steps_per_token", "theoretical", "realized")
MANY = 3
"""Forked threads from which on an answer counts as one with many."""
FEW_STEPS = 0.8
"""`steps_per_token` below which an answer's threads saved at least a fifth of its steps."""
WITH_MANY = f"with_{MANY}_threads_or_more"
WITH_FEW_STEPS = f"of_these_below_{FEW_STEPS}_steps_per_token"

DEFINITIONS = {
    "threads": "threads that the method forked",
    "sequential_steps": "step of the last token that any thread drew, an outline's included",
    "completion_tokens": "drawn tokens with at least one character in the final text",
    "steps_per_token": "sequential_steps / completion_tokens",
    "theoretical": "tokens of the sequential baseline's response / sequential_steps",
    "realized": "baseline's decode time / decode time, same engine and process, warm, the two "
    "alternating; median over pairs",
    "means": "geometric mean over prompts, 95% interval by the percentile bootstrap over prompts",
    "failures": "prompts that ended in an error; counted, and in no mean",
    WITH_MANY: f"prompts whose answer has at least {MANY} forked threads",
    WITH_FEW_STEPS: f"prompts of these whose steps_per_token is known and below {FEW_STEPS}: the "
    "threads saved at least a fifth of the steps",
    "left_out": "answers without a positive figure, in no mean of that figure",
}


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The lines of a UTF-8 file that are not blank, at most `limit`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read --prompts {str(path)!a} ({error})") from None
    prompts = [line for line in lines if line.strip()][:limit]
    if not prompts:
        raise InvalidInput(f"--prompts {str(path)!a} has no prompt; write one a line")
    return prompts


def check_method(lm: LM, method: str) -> str:
    """The name of the method meant; raises `InvalidInput` if that is sequential decoding itself."""
    name = lm.find_method(method).name
    if name == "sequential":
        raise InvalidInput(f"--method {method} is sequential decoding here; name another, as sot")
    return name


def measure(
    lm: LM, prompts: Sequence[str], method: str, *, params: SamplingParams, num_pairs: int,
    journal: Journal, report: Report,
) -> list[dict[str, Any]]:  # fmt: skip
    """Per prompt, in order, both answers as JSON, or the `error` that it ended with."""
    rows = []
    for number, prompt in enumerate(prompts, 1):
        key = hashlib.sha256(prompt.encode()).hexdigest()
        compute: Callable[[], Cell] = partial(_answer, lm, prompt, method, params, num_pairs)
        cell = journal.cell(key, compute)
        rows.append({"prompt": number, "sha256": key, **cell})
        realized = summary_of(rows[-1], method)["realized"]
        told = cell.get("error") or f"{realized:.2f} times as fast"
        report(f"prompt {number} of {len(prompts)}: {told}")
    return rows


def _answer(lm: LM, prompt: str, method: str, params: SamplingParams, num_pairs: int) -> Cell:
    from stretto.comparison import compare

    try:
        ours, baseline = compare(lm, prompt, params, method=method, pairs=num_pairs)
    except StrettoError as error:
        return {"error": str(error)}
    return {method: ours.to_json(), "sequential": baseline.to_json()}


def summary_of(row: dict[str, Any], method: str) -> dict[str, Any]:
    """One line of the table; figures None for a failed prompt."""
    ours, baseline = row.get(method), row.get("sequential")
    usage = ours["usage"] if ours else {}
    tokens, steps = usage.get("completion_tokens"), usage.get("sequential_steps")
    return {
        "prompt": row["prompt"],
        "sha256": row["sha256"][:12],
        "threads": len(ours["threads"]) - 1 if ours else None,
        "finish_reason": ours["finish_reason"] if ours else "error",
        "sequential_steps": steps,
        "completion_tokens": tokens,
        "baseline_tokens": baseline["usage"]["completion_tokens"] if baseline else None,
        "capped_threads": usage.get("capped_threads"),
        "steps_per_token": steps / tokens if tokens else None,
        "theoretical": ours["speedup"]["theoretical"] if ours else None,
        "realized": ours["speedup"]["realized"] if ours else None,
    }


def has_many(summary: dict[str, Any]) -> bool:
    return (summary["threads"] or 0) >= MANY


def counts_of(summaries: Sequence[dict[str, Any]]) -> dict[str, int]:
    """What `run.json` counts of the prompts."""
    many = [summary for summary in summaries if has_many(summary)]
    few = [s for s in many if s["steps_per_token"] is not None and s["steps_per_token"] < FEW_STEPS]
    return {
        "prompts": len(summaries),
        "failures": sum(summary["finish_reason"] == "error" for summary in summaries),
        WITH_MANY: len(many),
        WITH_FEW_STEPS: len(few),
    }


def means_of(summaries: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Geometric means of the figures with bootstrap intervals over prompts: of all prompts, and of
    those with many threads."""
    many = [summary for summary in summaries if has_many(summary)]
    groups = {"all": summaries, f"{MANY} threads or more": many}
    return [_mean(g, rows, figure, seed) for g, rows in groups.items() for figure in FIGURES]


def _mean(group: str, rows: Sequence[dict[str, Any]], figure: str, seed: int) -> dict[str, Any]:
    import numpy as np

    values = [row[figure] for row in rows if row[figure]]
    mean = low = high = None
    if values:
        logs = np.log(values)
        rng = np.random.default_rng(seed)
        resampled = logs[rng.integers(len(logs), size=(NUM_RESAMPLES, len(logs)))].mean(axis=1)
        low, high = (math.exp(v) for v in np.percentile(resampled, [2.5, 97.5]))
        mean = math.exp(logs.mean())
    return {
        "group": group,
        "figure": figure,
        "prompts": len(values),
        "left_out": len(rows) - len(values),
        "geometric_mean": mean,
        "low": low,
        "high": high,
    }
