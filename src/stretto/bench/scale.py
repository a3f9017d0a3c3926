"""What a token costs with many threads over long prefixes, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from stretto.bench import memory
from stretto.bench.pairs import PAUSE_S, Report, bootstrap_median, rested, rounded, run_pair
from stretto.bench.program import Target
from stretto.bench.sides import OwnSide, Side, Task
from stretto.bench.source import prompt_of, starts_of

if TYPE_CHECKING:
    from stretto.bench.journal import Cell, Journal
    from stretto.bench.source import Source

DEFINITIONS = {
    "threads": "threads that decode at once over one prefix of `context` tokens, greedily",
    "pool_slots": "KV slots that the engine has allocated",
    "token_ms": "median over pairs of the time of a run / (its steps x threads), in milliseconds",
    "over_one": "median over pairs of the time of a step / that of the first number of threads in "
    "the same pair",
    "low, high": "percentile bootstrap 95% interval of `over_one` over pairs",
    "copy_token_ms": "token_ms of transformers.generate with the prefix's keys and values repeated "
    "for each row; null where these are more than --copy-limit",
    "copy_ratio": "median over pairs of copy_token_ms / token_ms",
    "copy_low, copy_high": "percentile bootstrap 95% interval of `copy_ratio` over pairs",
    "pairs": "runs of each number of threads after an unmeasured one; ours and the batch "
    f"alternate, with {PAUSE_S} s of sleep before each",
}


@dataclass(frozen=True)
class Plan:
    """What to measure. `copies`: whether batched copying is measured beside it."""

    threads: Sequence[int]
    contexts: Sequence[int]
    pool_slots: Sequence[int]
    steps: int
    pairs: int
    seed: int
    copies: bool
    copy_limit_bytes: int

    def room_needed(self) -> tuple[int, int]:
        room = Task([0] * max(self.contexts), [[0] * max(self.threads)], self.steps)
        return room.num_positions, room.num_slots

    def copied(self, context: int, slot_bytes: int) -> list[int]:
        """The numbers of threads whose copies of a prefix are within the limit. While it grows, a
        layer's copy is there twice, which the limit leaves out."""
        if not self.copies:
            return []
        row_bytes = (context + self.steps + 1) * slot_bytes
        return [n for n in self.threads if n * row_bytes <= self.copy_limit_bytes]


def measure(
    targets: Sequence[Target], copying: Side | None, plan: Plan, journal: Journal, report: Report
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row per pool, context and number of threads; one record per run. The targets differ in
    their pools alone; the `copying` side is measured beside the first."""
    cells = []
    for target in targets:
        for context in plan.contexts:
            beside = copying if target is targets[0] else None
            compute = partial(_cell, target, beside, plan, context)
            cells.append(journal.cell(f"time/{target.engine.num_slots}/{context}", compute))
            for row in cells[-1]["row"]:
                what = f"context {context}, {row['threads']} threads"
                report(f"{what}, {row['pool_slots']} slots: {row['token_ms']:.3g} ms a token")
    rows = [row for cell in cells for row in cell["row"]]
    return rows, [record for cell in cells for record in cell["records"]]


def _cell(target: Target, copying: Side | None, plan: Plan, context: int) -> Cell:
    prompt = prompt_of(target, context, plan.seed)
    starts = {n: starts_of(target, prompt, n, plan.seed) for n in plan.threads}
    order = list(plan.threads)  # the warm-up, then a pass over all in either direction in turn
    for pair in range(plan.pairs):
        order += plan.threads if pair % 2 == 0 else reversed(plan.threads)
    copied = plan.copied(context, memory.bytes_of_slot(target.engine))
    own = OwnSide(target)
    own.open(Task(prompt, [starts[n] for n in order], plan.steps))
    beside = copying if copied else None
    if beside is not None:
        beside.open(Task(prompt, [starts[n] for n in order if n in copied], plan.steps))
    records: list[dict[str, Any]] = []
    for index, n in enumerate(order):
        pair = index // len(plan.threads) - 1
        copy_s = None
        if beside is not None and n in copied:
            own_s, copy_s = run_pair(pair, partial(_run, own), partial(_run, beside))
        else:
            own_s = _run(own)
        records.append(
            {"pool_slots": target.engine.num_slots, "context": context, "threads": n, "pair": pair}
            | {"steps": plan.steps, "own_s": own_s, "copy_s": copy_s}
        )
    own.close()
    if beside is not None:
        beside.close()
    kept = [r for r in records if r["pair"] >= 0]
    rows = [_row(plan, kept, target.engine.num_slots, context, n) for n in plan.threads]
    return {"row": rows, "records": kept}


def _run(side: Side) -> float:
    return rested(side.run).seconds


def _row(
    plan: Plan, records: list[dict[str, Any]], pool_slots: int, context: int, n: int
) -> dict[str, Any]:
    own = {r["pair"]: r["own_s"] for r in records if r["threads"] == n}
    first = {r["pair"]: r["own_s"] for r in records if r["threads"] == plan.threads[0]}
    copy = {r["pair"]: r["copy_s"] for r in records if r["threads"] == n and r["copy_s"]}
    over = bootstrap_median([own[p] / first[p] for p in own], plan.seed)
    row: dict[str, Any] = {
        "pool_slots": pool_slots,
        "context": context,
        "threads": n,
        "token_ms": 1000 * median(own.values()) / plan.steps / n,
        "over_one": over.median,
        "low": over.low,
        "high": over.high,
        "pairs": len(own),
        "copy_token_ms": None,
        "copy_ratio": None,
        "copy_low": None,
        "copy_high": None,
    }
    if copy:
        ratio = bootstrap_median([copy[p] / own[p] for p in copy], plan.seed)
        row["copy_token_ms"] = 1000 * median(copy.values()) / plan.steps / n
        row |= {"copy_ratio": ratio.median, "copy_low": ratio.low, "copy_high": ratio.high}
    return rounded(row)


# -- memory ----------------------------------------------------------------------------------------


def measure_memory(
    source: Source, dtype: str, engine: str, num_compute_threads: int | None, *, plan: Plan,
    journal: Journal, report: Report,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row per context and number of threads; each context in processes of its own."""
    threads = sorted(plan.threads)

    def compute(context: int) -> Cell:
        spec = memory.Spec(
            "own", source, dtype, engine, num_compute_threads, context, threads, plan.steps,
            plan.seed,
        )  # fmt: skip
        own, copies = memory.measure_apart(spec), dict[int, memory.Usage]()
        copied = [n for n in threads if n in plan.copied(context, own[0].slot_bytes)]
        if copied:
            spec = replace(spec, kind="copying", threads=copied)
            copies = dict(zip(copied, memory.measure_apart(spec), strict=True))
        return {"row": memory_rows(context, threads, own, copies, plan.steps)}

    rows = []
    for context in plan.contexts:
        report(f"memory with a prefix of {context} tokens")
        rows += journal.cell(f"memory/{context}", partial(compute, context))["row"]
    return rows


def memory_rows(
    context: int, threads: Sequence[int], own: Sequence[memory.Usage],
    copies: dict[int, memory.Usage], steps: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """The table of one context, from what was used; ratios need one thread among `threads`."""
    one = own[threads.index(1)] if 1 in threads else None
    rows = []
    for n, usage in zip(threads, own, strict=True):
        more = (n - 1) * (steps + 1) * usage.slot_bytes
        copy = copies.get(n)
        row: dict[str, Any] = {
            "context": context,
            "threads": n,
            "own_tokens": steps + 1,
            "kv_bytes": usage.kv_bytes,
            "kv_ratio": usage.kv_bytes / (one.kv_bytes + more) if one else None,
            "rss_bytes": usage.rss_bytes,
            "rss_ratio": usage.rss_bytes / (one.rss_bytes + more)
            if usage.rss_bytes is not None and one is not None and one.rss_bytes
            else None,
            "copy_kv_bytes": None if copy is None else copy.kv_bytes,
            "copy_rss_bytes": None if copy is None else copy.rss_bytes,
        }
        row["copy_kv_over_own"] = None if copy is None else copy.kv_bytes / usage.kv_bytes
        rows.append(rounded(row))
    return rows
