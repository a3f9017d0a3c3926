"""Stretto against other runtimes: same prompts, same weights, one process, interleaved pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.bench.pairs import PAUSE_S, Report, bootstrap_median, rested, rounded, run_pair
from stretto.bench.program import Target
from stretto.bench.sides import Decoded, OwnSide, Side, Task, opened
from stretto.bench.source import prompt_of, starts_of
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stretto.bench.journal import Cell, Journal
    from stretto.bench.lineup import Lineup

FULL_PRECISIONS = ("float32", "bfloat16", "BF16")
MAX_LOGIT_ERROR = 0.2
"""Of a side in one of these. One that computes another model is off by 1 or more."""

DEFINITIONS = {
    "prompts": "both sides go on from the same prompt of `context` tokens, computed once, with the "
    "same start token for each of `rows` sequences, and decode greedily",
    "stretto": "threads forked from one request over one prefix; the time is Scheduler.step's: "
    "pass, books, drawing, log-probabilities, events",
    "llama.cpp": "llama_decode and an argmax a row, by llama-cpp-python; sequences share the "
    "prefix's cells (llama_memory_seq_cp in a unified cache); keys and values in float16, its "
    "default; all matrices in the precision named, embedding and head included",
    "transformers": "transformers.generate, SDPA, its default cache, the prefix's keys and values "
    "repeated for each row; from the first token's logits to the last one's",
    "threads": "every side computes with `threads` threads, all cores unless told otherwise",
    "ratio": "median over pairs of the peer's time / ours for the same number of steps and rows: "
    "our tokens per second over the peer's",
    "low, high": "percentile bootstrap 95% interval of `ratio` over pairs",
    "pairs": "interleaved, the two sides in alternating order, after an unmeasured one; the "
    f"process sleeps {PAUSE_S} s before each side, so that no thread pool spins beside another",
    "*_tokens_per_s, *_step_ms": "median over pairs, of all rows together",
    "agree_tokens": "greedy tokens from the first on in which the two sides agree, mean over rows; "
    "of `steps`",
    "*_logit_error": "distance of the first step's logits from those of transformers in float32 "
    "with the same weights, over the norm of these less their mean; a side in float32 or bfloat16 "
    f"must be below {MAX_LOGIT_ERROR}",
}


@dataclass(frozen=True)
class Plan:
    """What to measure. `forks` 0 leaves the end-to-end comparison out."""

    rows: Sequence[int]
    contexts: Sequence[int]
    steps: int
    pairs: int
    forks: int
    fork_tokens: int
    seed: int

    def room_needed(self) -> tuple[int, int]:
        """Positions and KV slots of our side."""
        context = max(self.contexts)
        task = Task([0] * context, [[0] * max(self.rows)], self.steps)
        longest = max(task.num_positions, context + self.forks * self.fork_tokens + 1)
        return longest, max(task.num_slots, context + self.forks * (self.fork_tokens + 2))


def measure(
    targets: Sequence[Target], lineup: Lineup, plan: Plan, journal: Journal, report: Report
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row per context, number of rows, peer and target; and one record per side of each pair.

    Raises `StrettoError` for a side in full precision that computes something else.
    """
    cells = []
    for context, num_rows in product(plan.contexts, plan.rows):
        task = make_task(targets[0], plan, context, num_rows)
        for name, target in product(lineup.names, targets):
            key = f"decode/{context}/{num_rows}/{name}/{target.engine.name}/{target.dtype}"
            cells.append(journal.cell(key, partial(_decode_cell, target, lineup, name, task, plan)))
            row = cells[-1]["row"]
            at = f"{row['ours']} at {row['ratio']:.2f} times the speed of {row['peer']}"
            report(f"context {context}, {num_rows} rows: {at}")
    return [c["row"] for c in cells], [r for c in cells for r in c["records"]]


def make_task(target: Target, plan: Plan, context: int, num_rows: int) -> Task:
    prompt = prompt_of(target, context, plan.seed)
    starts = starts_of(target, prompt, num_rows, plan.seed)
    return Task(prompt, [starts] * (plan.pairs + 1), plan.steps)


Check = Callable[[Decoded, Decoded], None]


def timed_pairs(ours: Side, peer: Side, task: Task, check: Check) -> list[tuple[Decoded, Decoded]]:
    """All pairs of runs of a task. The first one is the warm-up: `check` sees it, and may raise,
    before anything is timed."""

    def run(pair: int) -> tuple[Decoded, Decoded]:
        return run_pair(pair, partial(rested, ours.run), partial(rested, peer.run))

    with opened(ours, task), opened(peer, task):
        warm = run(-1)
        check(*warm)
        return [warm, *(run(pair) for pair in range(len(task.bursts) - 1))]


def _decode_cell(target: Target, lineup: Lineup, name: str, task: Task, plan: Plan) -> Cell:
    ours, peer = OwnSide(target), lineup.side(name)
    reference, errors = lineup.reference(task), {}

    def check(*warm: Decoded) -> None:
        for side, decoded in zip((ours, peer), warm, strict=True):
            errors[side.name] = checked_error(side.name, decoded.first_logits, reference)

    pairs = timed_pairs(ours, peer, task, check)
    row = _decode_row(ours.name, peer.name, task, pairs[1:], plan.seed)
    row |= {
        "agree_tokens": agreement(pairs[0][0].tokens, pairs[0][1].tokens, plan.steps),
        "steps": plan.steps,
        "ours_logit_error": errors[ours.name],
        "peer_logit_error": errors[peer.name],
    }
    place = {"context": len(task.prompt), "rows": task.num_rows}
    records = [
        {**place, "pair": i, "ours": ours.name, "peer": peer.name, "ours_s": a.seconds,
         "peer_s": b.seconds, "steps": plan.steps}
        for i, (a, b) in enumerate(pairs[1:])
    ]  # fmt: skip
    return {"row": rounded(row), "records": records}


def _decode_row(
    ours: str, peer: str, task: Task, pairs: list[tuple[Decoded, Decoded]], seed: int
) -> dict[str, Any]:
    ratio = bootstrap_median([b.seconds / a.seconds for a, b in pairs], seed)
    ours_s, peer_s = median(a.seconds for a, _ in pairs), median(b.seconds for _, b in pairs)
    num_tokens = task.num_rows * task.num_steps
    return {
        "context": len(task.prompt),
        "rows": task.num_rows,
        "peer": peer,
        "ours": ours,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "pairs": len(pairs),
        "ours_tokens_per_s": num_tokens / ours_s,
        "peer_tokens_per_s": num_tokens / peer_s,
        "ours_step_ms": 1000 * ours_s / task.num_steps,
        "peer_step_ms": 1000 * peer_s / task.num_steps,
    }


def checked_error(side: str, logits: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """The error of a side's logits. Raises `StrettoError` if a side in full precision has so large
    a one that it computes other weights."""
    error = logit_error(logits, reference)
    if side.rsplit(maxsplit=1)[-1] in FULL_PRECISIONS and not error < MAX_LOGIT_ERROR:
        raise StrettoError(
            f"{side} does not compute these weights: its logits are off by {error:.3g} of their "
            "norm; leave it out, and report this"
        )
    return error


def logit_error(logits: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """|logits - reference| / |reference - its mean per row|, over rows x vocab."""
    spread = reference - reference.mean(axis=1, keepdims=True)
    return float(np.linalg.norm(logits - reference) / np.linalg.norm(spread))


def agreement(ours: list[list[int]], theirs: list[list[int]], limit: int) -> float:
    """Tokens from the first on, at most `limit`, that are the same; mean over rows."""
    lengths = []
    for a, b in zip(ours, theirs, strict=True):
        pairs = list(zip(a, b, strict=False))[:limit]
        lengths.append(next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs)))
    return fmean(lengths)
