"""`stretto bench scale`: many threads over long prefixes."""

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
    from stretto.bench.program import Target
    from stretto.bench.scale import Plan


def bench_scale(
    *,
    forks: Annotated[str, typer.Option(help="Numbers of threads.")] = "1,2,4,8,16,32,64",
    context: Annotated[str, typer.Option(help="Lengths of the prefix.")] = "128,512,2000,8000",
    pool_slots: Annotated[str, typer.Option(help="Sizes of the pool; 0: as needed.")] = "0",
    tokens: Annotated[int, typer.Option(help="Steps timed in a run.")] = 16,
    pairs: Pairs = 7,
    copying: Annotated[
        bool, typer.Option("--copying/--no-copying", help="Also a batch of copied prefixes.")
    ] = True,
    copy_limit: Annotated[
        float | None,
        typer.Option(help="GiB that copies may take; default: a third of the free.", min=0),
    ] = None,
    model: options.Model = EMBEDDED_MODEL,
    random_shape: RandomShape = False,
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time a token, and measure memory, by threads, context and pool; beside copied prefixes."""
    counts = sorted(parts.numbers("--forks", forks))
    contexts = parts.numbers("--context", context, low=2)
    pools = parts.numbers("--pool-slots", pool_slots, low=0)
    parts.check(tokens=tokens, pairs=pairs, threads=threads)
    parts.prepare(out)
    from stretto.bench import scale
    from stretto.bench.memory import available_bytes

    limit = available_bytes() // 3 if copy_limit is None else int(copy_limit * 2**30)
    plan = scale.Plan(counts, contexts, pools, tokens, pairs, seed, copying, limit)
    place = Place.of(model, random_shape, seed, dtype=dtype, engine=engine, threads=threads)
    settings = {
        "forks": counts,
        "context": contexts,
        "pool_slots": pools,
        "tokens": tokens,
        "pairs": pairs,
        "copying": copying,
        "copy_limit_gib": copy_limit,
        "seed": seed,
    }
    positions, slots = plan.room_needed()
    targets = [place.target((positions, max(slots, pool))) for pool in pools]
    journal = parts.start_journal(out, "scale", place, settings, targets[:1])
    result, records = _measure_scale(place, targets, plan, journal)
    if out is not None:
        _save_scale(out, targets[0], settings, result, records)
        journal.finish()
    parts.show(result if as_json else None, _scale_text(result))


def _measure_scale(
    place: Place, targets: list[Target], plan: Plan, journal: Journal
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from stretto.bench import scale
    from stretto.bench.machine import describe_machine

    source, say = place.source, parts.progress
    engine, dtype = targets[0].engine.name, targets[0].dtype
    memory = scale.measure_memory(
        source, dtype, engine, place.threads, plan=plan, journal=journal, report=say
    )
    side = None
    if plan.copies:
        from stretto.bench.peer_transformers import TransformersSide

        dtype = "float32" if dtype == "float32" else "bfloat16"
        side = TransformersSide(source.hf_model(dtype))
    rows, records = scale.measure(targets, side, plan, journal, say)
    return {"rows": rows, "memory": memory, "machine": describe_machine()}, records


def _save_scale(
    out: Path, target: Target, settings: dict[str, Any], result: dict[str, Any],
    records: list[dict[str, Any]],
) -> None:  # fmt: skip
    from stretto.bench import memory, report, scale

    definitions = scale.DEFINITIONS | memory.DEFINITIONS
    run = parts.describe("scale", target, settings, definitions, result["machine"])
    figure = report.plot_scale(result["rows"])
    parts.save(out, result["rows"], records, figure, run, memory=result["memory"])


def _scale_text(result: dict[str, Any]) -> str:
    from stretto.bench.report import format_table

    tables = format_table(result["rows"]), format_table(result["memory"])
    return "\n\n".join([tables[0], "memory:", tables[1]])
