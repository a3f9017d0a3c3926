"""What a step and its pass cost for r rows of r threads over a shared prefix, against one row."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

from stretto.bench.pairs import Report, bootstrap_median, rounded
from stretto.bench.program import ForkProgram, Target, Work
from stretto.errors import InvalidInput
from stretto.params import SamplingParams
from stretto.recorder import MAIN
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import MAX_ROWS, Scheduler

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.bench.journal import Cell, Journal
    from stretto.bench.machine import Speeds
    from stretto.engines.base import Engine
    from stretto.runtime.views import Run

NUM_PASSES = 8
"""Passes of a burst that are timed. Its first pass, which sets up views, and its last, after
which the next burst is forked, are not."""

BURST_TOKENS = NUM_PASSES + 2
"""Tokens that each thread of a burst feeds, its injected one included: one a pass."""

DEFINITIONS = {
    "context": "tokens of the prefix that all rows see, computed once",
    "rows": "threads with one row each per pass",
    "pass": f"one Engine.forward; of a burst of passes the median of {NUM_PASSES} counts, without "
    "the burst's first and last pass",
    "step": "one Scheduler.step: the pass, and all that is done around it: scheduling, books, "
    "drawing each row's token greedily with its log-probability, events; the text is detokenised "
    "at the request's end",
    "step_ratio": "median over pairs of bursts of the step time for `rows` rows / for 1 row, the "
    "two bursts of a pair in alternating order within one request",
    "step_low, step_high": "percentile bootstrap 95% interval of `step_ratio` over pairs",
    "ratio, low, high": "the same for the pass alone",
    "pass_ms, one_row_ms": "median over pairs of the pass time for `rows` rows and for 1 row",
    "step_ms": "median over pairs of the step time for `rows` rows",
    "scheduler_ms": "the same for the step without its pass",
    "scheduler_share": "scheduler_ms / step_ms",
    "bandwidth_share": "weight bytes / pass_ms / read_bytes_per_s; null without a known model",
    "flops_share": "FLOPs of the pass / pass_ms / matmul_flops; null without a known model. FLOPs: "
    "2 a row and weight of a linear layer, the head included, and 4 a row, layer, query head, head "
    "dimension and token of context",
    "weight_bytes": "all weights once, the input embedding only where it is the output head; "
    "keys and values are not counted",
    "read_bytes_per_s": "fastest of 9 sums over a 512 MiB float32 buffer, before and after the "
    "benchmark, with the torch threads and in the process that timed the row; for a row taken over "
    "from a killed process, before",
    "matmul_flops": "FLOPs per second of the fastest of 9 products of two 1024 x 1024 matrices, "
    "measured when read_bytes_per_s is, in the dtype of the weights (bfloat16 for int8)",
}


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of the scheduler that ran a pass."""

    rows: int
    engine_s: float
    step_s: float

    @property
    def scheduler_s(self) -> float:
        return self.step_s - self.engine_s


@dataclass(frozen=True, slots=True)
class Burst:
    """Medians over the timed passes of a burst, in seconds."""

    rows: int
    engine_s: float
    step_s: float
    scheduler_s: float


@dataclass
class TimedEngine:
    """An engine that notes rows and seconds of each pass."""

    engine: Engine
    times: list[tuple[int, float]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, runs: list[Run]) -> Tensor:
        start = time.perf_counter()
        logits = self.engine.forward(runs)
        self.times.append((sum(len(r.tokens) for r in runs), time.perf_counter() - start))
        return logits


def measure(
    target: Target, rows: Sequence[int], contexts: Sequence[int], *, num_pairs: int, seed: int,
    journal: Journal, report: Report, speeds: Speeds,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # fmt: skip
    """A row per context and number of rows, and one record per burst.

    A row has the `speeds` that this process measured before, or those of the process that timed
    it. Raises `InvalidInput` if the model or the pool is too small for it.
    """
    target.check_room(*room_needed(max(rows), max(contexts)))
    cells = []
    for context, num_rows in product(contexts, rows):
        compute = partial(_cell, target, num_rows, context, num_pairs, seed=seed, speeds=speeds)
        cells.append(journal.cell(f"{context}/{num_rows}", compute))
        row = cells[-1]["row"]
        report(f"context {context}, {num_rows} rows: {row['step_ratio']:.3f} of one row")
    return [c["row"] for c in cells], [r for c in cells for r in c["records"]]


def _cell(
    target: Target, num_rows: int, context: int, num_pairs: int, *, seed: int, speeds: Speeds
) -> Cell:
    pairs = measure_bursts(target, num_rows, context, num_pairs, seed)
    records = [
        {"context": context, "rows": burst.rows, "against": num_rows, "pair": pair}
        | {"side": side, "pass_s": burst.engine_s, "step_s": burst.step_s}
        for pair, sides in enumerate(pairs)
        for side, burst in zip(("rows", "one_row"), sides, strict=True)
    ]
    return {"row": _row(context, pairs, seed) | asdict(speeds), "records": records}


def room_needed(num_rows: int, context: int) -> tuple[int, int]:
    """Positions and KV slots that a measurement takes at once.

    Raises `InvalidInput` for more rows than a pass may have.
    """
    if num_rows >= MAX_ROWS:
        raise InvalidInput(f"{num_rows} rows are asked for; at most {MAX_ROWS - 1} fit one pass")
    return context + BURST_TOKENS, context + num_rows * BURST_TOKENS


def measure_bursts(
    target: Target, num_rows: int, context: int, num_pairs: int, seed: int
) -> list[tuple[Burst, Burst]]:
    """Pairs (bursts of `num_rows` rows, of one row), decoded by one request over one prefix."""
    order = [(num_rows, 1) if pair % 2 == 0 else (1, num_rows) for pair in range(num_pairs)]
    sizes = [num_rows, 1, *(size for pair in order for size in pair)]
    request = _request(target, sizes, context, seed)
    bursts = _bursts(_decode(target, request), context, sizes)[2:]
    pairs = []
    for i in range(num_pairs):
        ours, theirs = bursts[2 * i], bursts[2 * i + 1]
        pairs.append((ours, theirs) if i % 2 == 0 else (theirs, ours))
    return pairs


def _request(target: Target, sizes: list[int], context: int, seed: int) -> Request:
    """Main sees `context` tokens, its own drawn one included, and forks bursts of `sizes`."""
    rng = random.Random(f"step/{seed}/{context}/{sizes}")
    starts = [target.draw(rng, size) for size in sizes]
    program = ForkProgram(starts, BURST_TOKENS, keeps_last=False)
    first = target.draw(rng, 1)[0]
    return Request(
        target.draw(rng, context - 1),
        program,
        SamplingParams(max_tokens=2 + sum(sizes) * BURST_TOKENS),
        decode=target.decode,
        end_ids=frozenset(),
        max_positions=target.engine.max_positions,
        script=lambda thread, index: first if thread == MAIN else None,
    )


def _decode(target: Target, request: Request) -> list[Pass]:
    engine = TimedEngine(target.engine)
    scheduler = Scheduler(engine, Pool(target.engine.num_slots))
    scheduler.submit(request)
    steps: list[float] = []
    is_alive = True
    while is_alive:
        start = time.perf_counter()
        is_alive = scheduler.step()
        steps.append(time.perf_counter() - start)
    request.check()
    return [Pass(n, s, step) for (n, s), step in zip(engine.times, steps, strict=True)]


def _bursts(passes: list[Pass], context: int, sizes: list[int]) -> list[Burst]:
    """The passes cut into bursts; raises `AssertionError` if their rows are not as meant."""
    left, at = context - 1, 0
    while left > 0:
        left -= passes[at].rows
        at += 1
    bursts = []
    for number, size in enumerate(sizes):
        own, at = passes[at : at + BURST_TOKENS], at + BURST_TOKENS
        want = [size] * len(own)
        want[0] += number == 0  # main's drawn token
        if [p.rows for p in own] != want:
            raise AssertionError(f"burst {number}: got {[p.rows for p in own]} rows, not {want}")
        timed = own[1:-1]
        bursts.append(
            Burst(
                rows=size,
                engine_s=median(p.engine_s for p in timed),
                step_s=median(p.step_s for p in timed),
                scheduler_s=median(p.scheduler_s for p in timed),
            )
        )
    return bursts


def with_speeds(rows: list[dict[str, Any]], before: Speeds, now: Speeds) -> list[dict[str, Any]]:
    """The rows with the speeds `now`, but for those of another process, which have not `before`."""
    return [row | asdict(now) if row.items() >= asdict(before).items() else row for row in rows]


def with_rooflines(
    rows: list[dict[str, Any]], weight_bytes: int | None, work: Work | None
) -> list[dict[str, Any]]:
    """The rows with their shares of their own `read_bytes_per_s` and `matmul_flops`."""
    full = []
    for row in rows:
        pass_s, read, done = row["pass_ms"] / 1000, None, None
        if weight_bytes is not None:
            read = weight_bytes / pass_s / row["read_bytes_per_s"]
        if work is not None:
            done = work.flops(row["rows"], row["context"]) / pass_s / row["matmul_flops"]
        full.append(rounded(row | {"bandwidth_share": read, "flops_share": done}))
    return full


def _row(context: int, pairs: list[tuple[Burst, Burst]], seed: int) -> dict[str, Any]:
    step = bootstrap_median([ours.step_s / one.step_s for ours, one in pairs], seed)
    ratio = bootstrap_median([ours.engine_s / one.engine_s for ours, one in pairs], seed)
    pass_s = median(ours.engine_s for ours, _ in pairs)
    step_s = median(ours.step_s for ours, _ in pairs)
    scheduler_s = median(ours.scheduler_s for ours, _ in pairs)
    return rounded(
        {
            "context": context,
            "rows": pairs[0][0].rows,
            "step_ratio": step.median,
            "step_low": step.low,
            "step_high": step.high,
            "ratio": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
            "pairs": len(pairs),
            "pass_ms": 1000 * pass_s,
            "one_row_ms": 1000 * median(one.engine_s for _, one in pairs),
            "step_ms": 1000 * step_s,
            "scheduler_ms": 1000 * scheduler_s,
            "scheduler_share": scheduler_s / step_s,
        }
    )
