"""`stretto bench`: measure the runtime on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import bench_parts as parts
from stretto.cli import options
from stretto.cli.bench_e2e import bench_e2e
from stretto.cli.bench_parts import AsJson, Out, Pairs, Place, RandomShape, Seed
from stretto.cli.bench_peers import bench_peers
from stretto.cli.bench_scale import bench_scale
from stretto.cli.bench_weights import bench_weights
from stretto.models.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from stretto.bench.journal import Journal
    from stretto.bench.program import Target

app = typer.Typer(no_args_is_help=True, help="Measure the runtime on this machine.")


@app.command("forks")
def bench_forks(
    *,
    forks: Annotated[str, typer.Option(help="Numbers of forks.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(help="Forced tokens of each fork.")] = 64,
    pairs: Pairs = 7,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    model: options.Model = EMBEDDED_MODEL,
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
    journal = parts.start_journal(out, "forks", place, settings, [target])
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
    model: options.Model = EMBEDDED_MODEL,
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
    journal = parts.start_journal(out, "step", place, settings, [target])
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
    from stretto.bench.machine import Speeds, describe_machine, matmul_dtype
    from stretto.bench.step import measure, with_rooflines, with_speeds

    dtype, device = target.dtype, target.device
    before = Speeds.measured(dtype, device)
    summary, records = measure(
        target, rows, contexts, num_pairs=pairs, seed=seed, journal=journal,
        report=parts.progress, speeds=before,
    )  # fmt: skip
    now = before.faster(Speeds.measured(dtype, device))
    machine = {
        **describe_machine(device),
        "dtype": dtype,
        "read_bytes_per_s": now.read_bytes_per_s,
        "weight_bytes": target.weight_bytes,
        "matmul_flops": now.matmul_flops,
        "matmul_dtype": matmul_dtype(dtype),
        "linear": linears.measure(target.engine, now.read_bytes_per_s, seed),
    }
    summary = with_rooflines(with_speeds(summary, before, now), target.weight_bytes, target.work)
    bookkeeping = count_bookkeeping(rows)
    return {"rows": summary, "machine": machine, "bookkeeping": bookkeeping}, records


def _step_text(result: dict[str, Any]) -> str:
    from stretto.bench.report import format_table

    machine, aside = result["machine"], ("read_bytes_per_s", "matmul_flops")
    table = format_table([{k: v for k, v in r.items() if k not in aside} for r in result["rows"]])
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


app.command("peers")(bench_peers)
app.command("scale")(bench_scale)
app.command("e2e")(bench_e2e)
app.command("weights")(bench_weights)
