"""`stretto bench peers`: decoding against other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import bench_parts as parts
from stretto.cli import options
from stretto.cli.bench_parts import AsJson, Out, Pairs, Place, RandomShape, Seed
from stretto.models.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from stretto.bench.journal import Journal
    from stretto.bench.lineup import Kind
    from stretto.bench.peers import Plan
    from stretto.bench.program import Target


def bench_peers(
    *,
    peers: Annotated[str | None, typer.Option(help="Runtimes; those that are installed.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,4,8",
    context: Annotated[str, typer.Option(help="Lengths of the shared prompt.")] = "128",
    tokens: Annotated[int, typer.Option(help="Steps timed in a run.")] = 32,
    forks: Annotated[int, typer.Option(help="Threads end to end; 0 leaves this out.")] = 4,
    fork_tokens: Annotated[int, typer.Option(help="Tokens of each of these threads.")] = 128,
    pairs: Pairs = 7,
    model: options.Model = EMBEDDED_MODEL,
    random_shape: RandomShape = False,
    dtype: Annotated[str, typer.Option(help="Of our side; several between commas.")] = "auto",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time decoding against other runtimes: same prompts, weights, process, all cores."""
    counts, contexts = parts.numbers("--rows", rows), parts.numbers("--context", context, low=2)
    parts.check(tokens=tokens, fork_tokens=fork_tokens, pairs=pairs, threads=threads)
    parts.check(low=0, forks=forks)
    dtypes = parts.words("--dtype", dtype)
    from stretto.bench.lineup import chosen_kinds, installed_kinds, statuses
    from stretto.bench.peers import Plan

    kinds = installed_kinds() if peers is None else chosen_kinds(parts.words("--peers", peers))
    plan = Plan(counts, contexts, tokens, pairs, forks, fork_tokens, seed)
    parts.prepare(out)
    from stretto.bench.machine import usable_cores

    threads = usable_cores() if threads is None else threads
    place = Place.of(model, random_shape, seed, dtype=dtype, engine=engine, threads=threads)
    settings = {
        "peers": [kind.name for kind in kinds],
        "rows": counts,
        "context": contexts,
        "tokens": tokens,
        "forks": forks,
        "fork_tokens": fork_tokens,
        "pairs": pairs,
        "threads": threads,
        "seed": seed,
    }
    targets = [place.target(plan.room_needed(), one) for one in dtypes]
    parts.check_different(targets)
    runtimes = {"runtimes": statuses(kinds)}
    journal = parts.start_journal(out, "peers", place, settings | runtimes, targets)
    result, records = _measure_peers(targets, place, kinds, plan, journal)
    if out is not None:
        _save_peers(out, targets, settings, result, records)
        journal.finish()
    parts.show(result if as_json else None, _peers_text(result))


def _measure_peers(
    targets: list[Target], place: Place, kinds: list[Kind], plan: Plan, journal: Journal
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from stretto.bench import peer_forks, peers
    from stretto.bench.lineup import Lineup, statuses
    from stretto.bench.machine import describe_machine

    lineup = Lineup(place.source, kinds, place.threads or 1, parts.progress)
    rows, records = peers.measure(targets, lineup, plan, journal, parts.progress)
    forks, more = peer_forks.measure(targets, lineup, plan, journal, parts.progress)
    told = {"peers": statuses(kinds), "machine": describe_machine()}
    result = {"rows": rows, "forks": forks, **told}
    return result, records + more


def _save_peers(
    out: Path, targets: list[Target], settings: dict[str, Any], result: dict[str, Any],
    records: list[dict[str, Any]],
) -> None:  # fmt: skip
    from stretto.bench import peer_forks, peers, report

    definitions = peers.DEFINITIONS | peer_forks.DEFINITIONS
    run = parts.describe("peers", targets[0], settings, definitions, result["machine"])
    run |= {"dtype": ",".join(target.dtype for target in targets), "peers": result["peers"]}
    tables = {"forks": result["forks"]} if result["forks"] else {}
    parts.save(out, result["rows"], records, report.plot_peers(result["rows"]), run, **tables)


def _peers_text(result: dict[str, Any]) -> str:
    from stretto.bench.report import format_table

    tables = [format_table(result["rows"])]
    if result["forks"]:
        tables += ["forks against as many tokens one after the other:"]
        tables += [format_table(result["forks"])]
    others = [f"{p['name']}: {p['status']}" for p in result["peers"] if p["status"] != "measured"]
    return "\n\n".join([*tables, *(["\n".join(others)] if others else [])])
