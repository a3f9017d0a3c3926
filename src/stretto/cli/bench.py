"""`stretto bench`: measure the runtime on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import bench_parts as parts
from stretto.cli import options
from stretto.cli.bench_parts import AsJson, Out, Pairs, Place, RandomShape, Seed
from stretto.cli.bench_weights import bench_weights
from stretto.models.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from stretto.bench.journal import Journal
    from stretto.bench.peers import Kind, Plan
    from stretto.bench.program import Target
    from stretto.bench.scale import Plan as ScalePlan

app = typer.Typer(no_args_is_help=True, help="Measure the runtime on this machine.")
app.command("weights")(bench_weights)


@app.command("forks")
def bench_forks(
    *,
    forks: Annotated[str, typer.Option(help="Numbers of forks.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(help="Forced tokens of each fork.")] = 64,
    pairs: Pairs = 7,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    model: options.Model = DEFAULT_MODEL,
    random_shape: RandomShape = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time k forks of n forced tokens against the same tokens one after the other."""
    counts = parts.numbers("--forks", forks)
    parts.check(tokens=tokens, pairs=pairs, prompt_tokens=prompt_tokens, threads=threads)
    parts.prepare(out)
    from stretto.bench import report
    from stretto.bench.forks import DEFINITIONS, measure, room_needed
    from stretto.bench.machine import describe_machine

    place = Place.of(
        model, random_shape, seed, dtype=dtype, engine=engine, device=device, threads=threads
    )
    target = place.target(room_needed(max(counts), tokens, prompt_tokens))
    settings = {"forks": counts, "tokens": tokens, "prompt_tokens": prompt_tokens, "pairs": pairs}
    settings |= {"seed": seed}
    journal = parts.start_journal(out, "forks", place, settings)
    rows, records = measure(
        target,
        counts,
        num_tokens=tokens,
        num_prompt=prompt_tokens,
        num_pairs=pairs,
        seed=seed,
        journal=journal,
        report=parts.progress,
    )
    if out is not None:
        run = parts.describe("forks", target, settings, DEFINITIONS, describe_machine(device))
        parts.save(out, rows, records, report.plot_forks(rows), run)
        journal.finish()
    parts.show(rows if as_json else None, report.format_table(rows))


@app.command("step")
def bench_step(
    *,
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,2,4,8,16",
    context: Annotated[str, typer.Option(help="Lengths of the shared prefix.")] = "128,512,2048",
    pairs: Pairs = 7,
    model: options.Model = DEFAULT_MODEL,
    random_shape: RandomShape = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time a step and its pass for r rows against one row; shares of bandwidth and FLOPs."""
    counts, contexts = parts.numbers("--rows", rows), parts.numbers("--context", context, low=2)
    parts.check(pairs=pairs, threads=threads)
    parts.prepare(out)
    from stretto.bench import bookkeeping, linears, report, step

    place = Place.of(
        model, random_shape, seed, dtype=dtype, engine=engine, device=device, threads=threads
    )
    target = place.target(step.room_needed(max(counts), max(contexts)))
    settings = {"rows": counts, "context": contexts, "pairs": pairs, "seed": seed}
    journal = parts.start_journal(out, "step", place, settings)
    result, records = _measure_step(
        target, counts, contexts, pairs=pairs, seed=seed, journal=journal
    )
    if out is not None:
        definitions = step.DEFINITIONS | linears.DEFINITIONS | bookkeeping.DEFINITIONS
        run = parts.describe("step", target, settings, definitions, result["machine"])
        run |= {"bookkeeping": result["bookkeeping"]}
        parts.save(out, result["rows"], records, report.plot_step(result["rows"]), run)
        journal.finish()
    parts.show(result if as_json else None, _step_text(result))


def _measure_step(
    target: Target, rows: list[int], contexts: list[int], *, pairs: int, seed: int, journal: Journal
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `--json` prints, and a record per burst."""
    from stretto.bench import linears
    from stretto.bench.bookkeeping import count_bookkeeping
    from stretto.bench.machine import (
        describe_machine,
        matmul_dtype,
        matmul_peak,
        read_bandwidth,
    )
    from stretto.bench.step import measure, with_rooflines

    dtype, device = target.dtype, target.device
    before = read_bandwidth(device), matmul_peak(dtype, device)
    summary, records = measure(
        target, rows, contexts, num_pairs=pairs, seed=seed, journal=journal, report=parts.progress
    )
    bandwidth = max(before[0], read_bandwidth(device))
    flops = max(before[1], matmul_peak(dtype, device))
    machine = {
        **describe_machine(device),
        "dtype": dtype,
        "read_bytes_per_s": round(bandwidth),
        "weight_bytes": target.weight_bytes,
        "matmul_flops": round(flops),
        "matmul_dtype": matmul_dtype(dtype),
        "linear": linears.measure(target.engine, bandwidth, seed),
    }
    summary = with_rooflines(summary, target.weight_bytes, target.work, bandwidth, flops)
    bookkeeping = count_bookkeeping(rows)
    return {"rows": summary, "machine": machine, "bookkeeping": bookkeeping}, records


def _step_text(result: dict[str, Any]) -> str:
    from stretto.bench.report import format_table

    machine, table = result["machine"], format_table(result["rows"])
    counted = format_table(result["bookkeeping"])
    lines = [_roofline_line(machine)]
    if (linear := machine["linear"]) is not None:
        lines += [
            f"linear layers, 1 row: {linear['linear_ms']:.4g} ms, {linear['linear_share']:.3f} of "
            f"that bandwidth ({linear['linear_low']:.3f} to {linear['linear_high']:.3f})"
        ]
    return "\n\n".join([table, "\n".join(lines), "counted without a model:", counted])


def _roofline_line(machine: dict[str, Any]) -> str:
    read = machine["weight_bytes"]
    weights = "" if read is None else f"; a pass reads {read / 1e6:.0f} MB of weights"
    bandwidth, flops = machine["read_bytes_per_s"] / 1e9, machine["matmul_flops"] / 1e9
    return (
        f"measured: reads {bandwidth:.1f} GB/s, {machine['matmul_dtype']} matmul {flops:.0f} "
        f"GFLOP/s{weights}"
    )


@app.command("peers")
def bench_peers(
    *,
    peers: Annotated[str, typer.Option(help="Runtimes to compare with.")] = (
        "llama.cpp,transformers"
    ),
    rows: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,4,8",
    context: Annotated[str, typer.Option(help="Lengths of the shared prompt.")] = "128",
    tokens: Annotated[int, typer.Option(help="Steps timed in a run.")] = 32,
    forks: Annotated[int, typer.Option(help="Threads end to end; 0 leaves this out.")] = 4,
    fork_tokens: Annotated[int, typer.Option(help="Tokens of each of these threads.")] = 128,
    pairs: Pairs = 7,
    model: options.Model = DEFAULT_MODEL,
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
    from stretto.bench.peers import Plan, chosen_kinds

    kinds = chosen_kinds(parts.words("--peers", peers))
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
    journal = parts.start_journal(out, "peers", place, settings)
    targets = [place.target(plan.room_needed(), one) for one in dtypes]
    parts.check_different(targets)
    result, records = _measure_peers(targets, place, kinds, plan, journal)
    if out is not None:
        _save_peers(out, targets, settings, result, records)
        journal.finish()
    parts.show(result if as_json else None, _peers_text(result))


def _measure_peers(
    targets: list[Target], place: Place, kinds: list[Kind], plan: Plan, journal: Journal
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from stretto.bench import peers
    from stretto.bench.machine import describe_machine

    lineup = peers.Lineup(place.source, kinds, place.threads or 1, parts.progress)
    rows, records = peers.measure(targets, lineup, plan, journal, parts.progress)
    forks, more = peers.measure_forks(targets, lineup, plan, journal, parts.progress)
    machine = describe_machine() | {"peers": lineup.facts()}
    result = {"rows": rows, "forks": forks, "peers": peers.statuses(kinds), "machine": machine}
    return result, records + more


def _save_peers(
    out: Path, targets: list[Target], settings: dict[str, Any], result: dict[str, Any],
    records: list[dict[str, Any]],
) -> None:  # fmt: skip
    from stretto.bench import peers, report

    definitions = peers.DEFINITIONS | peers.FORK_DEFINITIONS
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


@app.command("scale")
def bench_scale(
    *,
    forks: Annotated[str, typer.Option(help="Numbers of threads.")] = "1,2,4,8,16,32,64",
    context: Annotated[str, typer.Option(help="Lengths of the prefix.")] = "128,512,2000,8000",
    pool_slots: Annotated[str, typer.Option(help="Sizes of the pool; 0: as needed.")] = "0",
    tokens: Annotated[int, typer.Option(help="Steps timed in a run.")] = 16,
    pairs: Pairs = 3,
    copying: Annotated[
        bool, typer.Option("--copying/--no-copying", help="Also a batch of copied prefixes.")
    ] = True,
    copy_limit: Annotated[
        float | None,
        typer.Option(help="GiB that copies may take; default: a third of the free.", min=0),
    ] = None,
    model: options.Model = DEFAULT_MODEL,
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
    journal = parts.start_journal(out, "scale", place, settings)
    result, records, target = _measure_scale(place, plan, journal)
    if out is not None:
        _save_scale(out, target, settings, result, records)
        journal.finish()
    parts.show(result if as_json else None, _scale_text(result))


def _measure_scale(
    place: Place, plan: ScalePlan, journal: Journal
) -> tuple[dict[str, Any], list[dict[str, Any]], Target]:
    from stretto.bench import scale
    from stretto.bench.machine import describe_machine

    source, say = place.source, parts.progress
    memory = scale.measure_memory(
        source, place.dtype, place.engine, place.threads, plan=plan, journal=journal, report=say
    )
    positions, slots = plan.room_needed()
    targets = [place.target((positions, max(slots, pool))) for pool in plan.pool_slots]
    side = None
    if plan.copies:
        from stretto.bench.peer_transformers import TransformersSide

        dtype = "float32" if targets[0].dtype == "float32" else "bfloat16"
        side = TransformersSide(source.hf_model(dtype))
    rows, records = scale.measure(targets, side, plan, journal, say)
    result = {"rows": rows, "memory": memory, "machine": describe_machine()}
    return result, records, targets[0]


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


@app.command("e2e")
def bench_e2e(
    *,
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="Prompts, one a line.")],
    method: options.Method = "auto",
    pairs: Pairs = 3,
    max_tokens: options.MaxTokens = 300,
    limit: Annotated[int | None, typer.Option(help="Only so many prompts.")] = None,
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time a method against sequential decoding of the same weights, over a file of prompts."""
    parts.check(pairs=pairs, max_tokens=max_tokens, limit=limit, threads=threads)
    from stretto.bench import e2e

    texts = e2e.read_prompts(prompts, limit)
    parts.prepare(out)
    from stretto.bench.program import Target
    from stretto.params import SamplingParams

    place = Place.of(model, False, seed, dtype=dtype, engine=engine, device=device, threads=threads)
    lm = place.lm()
    method = e2e.check_method(lm, method)
    settings = {"method": method, "pairs": pairs, "max_tokens": max_tokens, "seed": seed}
    journal = parts.start_journal(out, "e2e", place, settings)
    params = SamplingParams(max_tokens=max_tokens)
    rows = e2e.measure(
        lm, texts, method, params=params, num_pairs=pairs, journal=journal, report=parts.progress
    )
    summary = [e2e.summary_of(row, method) for row in rows]
    result = {"rows": summary, "means": e2e.means_of(summary, seed)}
    if out is not None:
        settings |= {"prompts": str(prompts), "limit": limit}
        _save_e2e(out, Target.of(lm), settings, result, rows)
        journal.finish()
    parts.show(result if as_json else None, _e2e_text(result))
    if any("error" in row for row in rows):
        raise typer.Exit(3)


def _save_e2e(
    out: Path, target: Target, settings: dict[str, Any], result: dict[str, Any],
    rows: list[dict[str, Any]],
) -> None:  # fmt: skip
    from stretto.bench import e2e, report
    from stretto.bench.machine import describe_machine

    machine = describe_machine(target.device)
    run = parts.describe("e2e", target, settings, e2e.DEFINITIONS, machine)
    many = [row for row in result["rows"] if e2e.has_many(row)]
    run |= {
        "prompts": len(rows),
        "failures": sum("error" in row for row in rows),
        "with_3_threads_or_more": len(many),
        "of_these_below_0.8_steps_per_token": sum(row["steps_per_token"] < 0.8 for row in many),
    }
    figure = report.plot_e2e(result["rows"])
    parts.save(out, result["rows"], rows, figure, run, raw="rows", means=result["means"])


def _e2e_text(result: dict[str, Any]) -> str:
    from stretto.bench.report import format_table

    return "\n\n".join([format_table(result["rows"]), format_table(result["means"])])
