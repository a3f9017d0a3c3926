"""Forks end to end against as many tokens one after the other in llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

from stretto.bench.pairs import Report, bootstrap_median, rested, rounded, run_pair
from stretto.bench.peers import Plan, make_task
from stretto.bench.program import ForkProgram, Target
from stretto.bench.sides import OwnSide, Task
from stretto.params import SamplingParams
from stretto.recorder import MAIN
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from stretto.bench.journal import Cell, Journal
    from stretto.bench.lineup import Lineup

DEFINITIONS = {
    "forks": "our side: one request that reads the prompt and forks this many threads",
    "tokens": "tokens that each fork draws; the peer draws forks x tokens tokens one after the "
    "other from the same prompt",
    "forks_s": "wall clock of our request from submission to end, prompt and text included; "
    "median over pairs",
    "sequential_s": "wall clock of the peer from the prompt to the last token, in a context whose "
    "memory has been written to before; median over pairs",
    "forks_ratio": "median over pairs of sequential_s / forks_s",
    "forks_low, forks_high": "percentile bootstrap 95% interval of `forks_ratio` over pairs",
    "fastest": "whether this is the peer with the least sequential_s",
}


def measure(
    targets: Sequence[Target], lineup: Lineup, plan: Plan, journal: Journal, report: Report
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row per precision of llama.cpp and target, and one record per pair: our forks against the
    same number of tokens one after the other."""
    if not plan.forks:
        return [], []
    context = min(plan.contexts)
    cells = []
    for precision, target in product(lineup.llama_precisions, targets):
        key = f"forks/{context}/{precision}/{target.engine.name}/{target.dtype}"
        cells.append(
            journal.cell(key, partial(_forks_cell, target, lineup, precision, plan, context))
        )
        row = cells[-1]["row"]
        ratio = f"{row['forks_ratio']:.2f} times the speed of {row['peer']}"
        report(f"{row['forks']} forks: {row['ours']} at {ratio}")
    rows = [c["row"] for c in cells]
    least = min((row["sequential_s"] for row in rows), default=None)
    best = next((row["peer"] for row in rows if row["sequential_s"] == least), None)
    rows = [row | {"fastest": row["peer"] == best} for row in rows]
    return rows, [r for c in cells for r in c["records"]]


def _forks_cell(target: Target, lineup: Lineup, precision: str, plan: Plan, context: int) -> Cell:
    peer = lineup.llama(precision)
    task = make_task(target, plan, context, plan.forks)
    num_tokens = plan.forks * plan.fork_tokens

    ours = partial(rested, partial(forks_s, target, task, plan.fork_tokens))
    theirs = partial(rested, partial(peer.sequential, task.prompt, num_tokens))
    pairs = [run_pair(pair, ours, theirs) for pair in range(-1, plan.pairs)][1:]
    ratio = bootstrap_median([b / a for a, b in pairs], plan.seed)
    name = OwnSide(target).name
    row = {
        "context": context,
        "forks": plan.forks,
        "tokens": plan.fork_tokens,
        "peer": peer.name,
        "ours": name,
        "forks_ratio": ratio.median,
        "forks_low": ratio.low,
        "forks_high": ratio.high,
        "pairs": len(pairs),
        "forks_s": median(a for a, _ in pairs),
        "sequential_s": median(b for _, b in pairs),
    }
    records = [
        {"context": context, "pair": i, "ours": name, "peer": peer.name, "forks_s": a,
         "sequential_s": b, "forks": plan.forks, "tokens": plan.fork_tokens}
        for i, (a, b) in enumerate(pairs)
    ]  # fmt: skip
    return {"row": rounded(row), "records": records}


def forks_s(target: Target, task: Task, num_tokens: int) -> float:
    """Seconds of one request from submission to end: the prompt, then a thread per start token
    that draws `num_tokens` tokens."""
    last = task.prompt[-1]
    request = Request(
        task.prompt[:-1],
        ForkProgram(task.bursts[:1], num_tokens),
        SamplingParams(max_tokens=1 + task.num_rows * num_tokens),
        decode=target.decode,
        end_ids=frozenset(),
        max_positions=target.engine.max_positions,
        script=lambda thread, index: last if thread == MAIN else None,
    )
    scheduler = Scheduler(target.engine, Pool(target.engine.num_slots))
    start = time.perf_counter()
    scheduler.submit(request)
    while scheduler.step():
        pass
    request.check()
    seconds = time.perf_counter() - start
    if request.num_drawn != 1 + task.num_rows * num_tokens:
        raise AssertionError(f"{request.num_drawn} tokens were drawn")
    return seconds
