"""k forks of n forced tokens, against the same tokens one after the other in one thread."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from stretto.bench.pairs import Interval, Report, bootstrap_median, rounded, run_pair
from stretto.bench.program import ForkProgram, Target, child_name, drawn_tokens, last_step
from stretto.dialects.plain import PlainSession
from stretto.params import SamplingParams
from stretto.recorder import MAIN
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from stretto.bench.journal import Cell, Journal
    from stretto.dialects.base import Session
    from stretto.runtime.request import Script

DEFINITIONS = {
    "forks": "threads forked at once from one prompt and one drawn token",
    "tokens": "forced tokens that each thread draws",
    "theoretical": "decode steps of the sequential side / those of the parallel side; decode steps "
    "= measured step of the last drawn token - 1, the first step being the prefill's",
    "realized": "median over pairs of the sequential side's decode time / the parallel side's",
    "low, high": "percentile bootstrap 95% interval of `realized` over pairs",
    "decode time": "wall clock from the prefill's drawn token to the end of the request; forking, "
    "scheduling, log-probabilities and detokenisation included, choosing a token not (forced)",
    "*_s": "median over pairs of the decode time in seconds",
    "*_step_ms": "*_s / decode steps, in milliseconds",
    "sequential": "the same prompt, first token and forks x tokens tokens in one thread, by plain "
    "decoding on the same engine in the same process",
}


@dataclass(frozen=True)
class Workload:
    """Forced tokens: a prompt, the first token, and per fork an injected token and a chunk."""

    prompt: list[int]
    first: int
    starts: list[int]
    chunks: list[list[int]]

    @property
    def num_forced(self) -> int:
        return sum(map(len, self.chunks))


@dataclass(frozen=True, slots=True)
class Timed:
    """One side of one pair. `steps`: decode steps, without the prefill's."""

    decode_s: float
    steps: int


def make_workload(
    target: Target, num_forks: int, num_tokens: int, num_prompt: int, seed: int
) -> Workload:
    """Random ordinary ids, a function of the arguments alone."""
    rng = random.Random(f"forks/{seed}/{num_forks}/{num_tokens}/{num_prompt}")
    return Workload(
        prompt=target.draw(rng, num_prompt),
        first=target.draw(rng, 1)[0],
        starts=target.draw(rng, num_forks),
        chunks=[target.draw(rng, num_tokens) for _ in range(num_forks)],
    )


def room_needed(num_forks: int, num_tokens: int, num_prompt: int) -> tuple[int, int]:
    """Positions of the sequential side; KV slots of the parallel one, injected tokens included."""
    longest = num_prompt + 1 + num_forks * num_tokens
    return longest, longest + num_forks


def make_parallel(target: Target, work: Workload) -> Request:
    """The chunks as threads forked at once."""
    forced = {MAIN: [work.first]}
    forced |= {child_name(i): chunk for i, chunk in enumerate(work.chunks)}
    program = ForkProgram([work.starts], len(work.chunks[0]))
    return _request(target, work, program, lambda thread, index: forced[thread][index])


def make_sequential(target: Target, work: Workload) -> Request:
    """The chunks one after the other in one thread."""
    forced = [work.first, *(token for chunk in work.chunks for token in chunk)]
    return _request(target, work, PlainSession(), lambda thread, index: forced[index])


def decode(target: Target, request: Request) -> Timed:
    """Decodes a request alone, in a fresh pool over the engine."""
    scheduler = Scheduler(target.engine, Pool(target.engine.num_slots))
    scheduler.submit(request)
    while scheduler.step():
        pass
    request.check()
    timing = request.timing
    if timing.first_token is None or timing.finished is None:
        raise AssertionError("the request is done but has no times")
    return Timed(timing.finished - timing.first_token, last_step(request) - 1)


def measure(
    target: Target, forks: Sequence[int], *, num_tokens: int, num_prompt: int, num_pairs: int,
    seed: int, journal: Journal, report: Report,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # fmt: skip
    """A row per number of forks, and one record per side of each pair.

    Raises `InvalidInput` if the model or the pool is too small for it.
    """
    target.check_room(*room_needed(max(forks), num_tokens, num_prompt))
    cells = []
    for k in forks:
        work = make_workload(target, k, num_tokens, num_prompt, seed)
        cells.append(journal.cell(f"{k}", partial(_cell, target, work, num_pairs, seed)))
        row = cells[-1]["row"]
        report(f"{k} forks: {row['realized']:.2f} of {row['theoretical']:.2f}")
    return [c["row"] for c in cells], [r for c in cells for r in c["records"]]


def _cell(target: Target, work: Workload, num_pairs: int, seed: int) -> Cell:
    k = len(work.chunks)
    pairs = [_pair(target, work, pair) for pair in range(-1, num_pairs)][1:]
    records = [
        {"forks": k, "pair": i, "side": side, "position": (i + j) % 2}
        | {"decode_s": timed.decode_s, "steps": timed.steps}
        for i, pair in enumerate(pairs)
        for j, (side, timed) in enumerate(zip(("parallel", "sequential"), pair, strict=True))
    ]
    return {"row": _row(k, len(work.chunks[0]), pairs, seed), "records": records}


def _pair(target: Target, work: Workload, pair: int) -> tuple[Timed, Timed]:
    """Both sides of one pair (parallel, sequential); pair -1 is the warm-up."""
    parallel, sequential = make_parallel(target, work), make_sequential(target, work)
    timed = run_pair(pair, lambda: decode(target, parallel), lambda: decode(target, sequential))
    written = [drawn_tokens(parallel, child_name(i)) for i in range(len(work.chunks))]
    ours, theirs = [t for chunk in written for t in chunk], drawn_tokens(sequential, MAIN)[1:]
    if not ours == theirs or len(ours) != work.num_forced:
        raise AssertionError("the two sides did not decode the same tokens")
    return timed


def _row(
    num_forks: int, num_tokens: int, pairs: list[tuple[Timed, Timed]], seed: int
) -> dict[str, Any]:
    realized: Interval = bootstrap_median([s.decode_s / p.decode_s for p, s in pairs], seed)
    (parallel_steps,) = {p.steps for p, _ in pairs}
    (sequential_steps,) = {s.steps for _, s in pairs}
    parallel_s = median(p.decode_s for p, _ in pairs)
    sequential_s = median(s.decode_s for _, s in pairs)
    return rounded(
        {
            "forks": num_forks,
            "tokens": num_tokens,
            "theoretical": sequential_steps / parallel_steps,
            "realized": realized.median,
            "low": realized.low,
            "high": realized.high,
            "pairs": len(pairs),
            "parallel_steps": parallel_steps,
            "sequential_steps": sequential_steps,
            "parallel_s": parallel_s,
            "sequential_s": sequential_s,
            "parallel_step_ms": 1000 * parallel_s / parallel_steps,
            "sequential_step_ms": 1000 * sequential_s / sequential_steps,
        }
    )


def _request(target: Target, work: Workload, session: Session, script: Script) -> Request:
    return Request(
        list(work.prompt),
        session,
        SamplingParams(max_tokens=1 + work.num_forced),
        decode=target.decode,
        end_ids=frozenset(),
        max_positions=target.engine.max_positions,
        script=script,
    )
