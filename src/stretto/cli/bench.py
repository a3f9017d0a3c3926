"""`stretto bench`: measure the runtime on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import options
from stretto.models.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stretto.bench.program import Target

app = typer.Typer(no_args_is_help=True, help="Measure the runtime on this machine.")

Pairs = Annotated[int, typer.Option(help="Interleaved pairs after the warm-up; few say little.")]
Seed = Annotated[int, typer.Option(help="Of the forced tokens and the bootstrap.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write raw pairs, summary, plot, run.json here.")
]


@app.command("forks")
def bench_forks(
    *,
    forks: Annotated[str, typer.Option(help="Numbers of forks.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(help="Forced tokens of each fork.")] = 64,
    pairs: Pairs = 7,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time k forks of n forced tokens against the same tokens one after the other."""
    counts = _numbers("--forks", forks)
    _check(tokens=tokens, pairs=pairs, prompt_tokens=prompt_tokens, threads=threads)
    _prepare(out)
    from stretto.bench import report
    from stretto.bench.forks import DEFINITIONS, measure, room_needed
    from stretto.bench.machine import describe_machine

    room = room_needed(max(counts), tokens, prompt_tokens)
    target = _load(model, dtype, device, threads, room)
    rows, records = measure(
        target,
        counts,
        num_tokens=tokens,
        num_prompt=prompt_tokens,
        num_pairs=pairs,
        seed=seed,
        report=_progress,
    )
    settings = {"forks": counts, "tokens": tokens, "prompt_tokens": prompt_tokens, "pairs": pairs}
    run = _run("forks", target, settings | {"seed": seed}, DEFINITIONS, describe_machine(device))
    if out is not None:
        _save(out, rows, records, report.plot_forks(rows), run)
    _print(rows if as_json else None, report.format_table(rows))


@app.command("step")
def bench_step(
    *,
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,2,4,8,16",
    context: Annotated[str, typer.Option(help="Lengths of the shared prefix.")] = "128,512,2048",
    pairs: Pairs = 7,
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time a step and its pass for r rows against one row; shares of bandwidth and FLOPs."""
    counts, contexts = _numbers("--rows", rows), _numbers("--context", context, low=2)
    _check(pairs=pairs, threads=threads)
    _prepare(out)
    from stretto.bench import report
    from stretto.bench.step import room_needed

    target = _load(model, dtype, device, threads, room_needed(max(counts), max(contexts)))
    settings = {"rows": counts, "context": contexts, "pairs": pairs, "seed": seed}
    result, records = _measure_step(target, counts, contexts, pairs, seed)
    if out is not None:
        run = _describe_step(target, settings, result)
        _save(out, result["rows"], records, report.plot_step(result["rows"]), run)
    _print(result if as_json else None, _step_text(result))


def _measure_step(
    target: Target, rows: list[int], contexts: list[int], pairs: int, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `--json` prints, and a record per burst."""
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
    summary, records = measure(target, rows, contexts, num_pairs=pairs, seed=seed, report=_progress)
    bandwidth = max(before[0], read_bandwidth(device))
    flops = max(before[1], matmul_peak(dtype, device))
    machine = {
        **describe_machine(device),
        "dtype": dtype,
        "read_bytes_per_s": round(bandwidth),
        "weight_bytes": target.weight_bytes,
        "matmul_flops": round(flops),
        "matmul_dtype": matmul_dtype(dtype),
    }
    summary = with_rooflines(summary, target.weight_bytes, target.work, bandwidth, flops)
    bookkeeping = count_bookkeeping(rows)
    return {"rows": summary, "machine": machine, "bookkeeping": bookkeeping}, records


def _describe_step(
    target: Target, settings: dict[str, Any], result: dict[str, Any]
) -> dict[str, Any]:
    from stretto.bench import bookkeeping, step

    definitions = step.DEFINITIONS | bookkeeping.DEFINITIONS
    run = _run("step", target, settings, definitions, result["machine"])
    return run | {"bookkeeping": result["bookkeeping"]}


def _step_text(result: dict[str, Any]) -> str:
    from stretto.bench.report import format_table

    machine, table = result["machine"], format_table(result["rows"])
    counted = format_table(result["bookkeeping"])
    return "\n\n".join([table, _roofline_line(machine), "counted without a model:", counted])


def _roofline_line(machine: dict[str, Any]) -> str:
    read = machine["weight_bytes"]
    weights = "" if read is None else f"; a pass reads {read / 1e6:.0f} MB of weights"
    bandwidth, flops = machine["read_bytes_per_s"] / 1e9, machine["matmul_flops"] / 1e9
    return (
        f"measured: reads {bandwidth:.1f} GB/s, {machine['matmul_dtype']} matmul {flops:.0f} "
        f"GFLOP/s{weights}"
    )


def _numbers(option: str, text: str, low: int = 1) -> list[int]:
    """Whole numbers between commas, each at least `low`, without repetitions."""
    from stretto.errors import InvalidInput

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < low:
        raise InvalidInput(
            f"{option} is {text!r}; give whole numbers of at least {low}, such as 2,4"
        )
    return list(dict.fromkeys(numbers))


def _check(**values: int | None) -> None:
    from stretto.errors import InvalidInput

    for name, value in values.items():
        if value is not None and value < 1:
            raise InvalidInput(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def _prepare(out: Path | None) -> None:
    if out is not None:
        from stretto.bench.report import prepare_folder

        prepare_folder(out)


def _load(
    model: str, dtype: str, device: str, threads: int | None, room: tuple[int, int]
) -> Target:
    """The model in an engine with `room`: positions, which it must have, and KV slots."""
    from stretto.bench.program import Target, check_room
    from stretto.cli.answer import load
    from stretto.lm import DEFAULT_POOL_SLOTS
    from stretto.models import resolve

    positions, slots = room
    check_room(positions, resolve(model).facts.context_length, "positions")
    lm = load(
        model,
        dtype=dtype,
        device=device,
        threads=threads,
        pool_slots=max(DEFAULT_POOL_SLOTS, slots),
        page_size=1,
        offline=False,
    )
    return Target.of(lm)


def _run(
    name: str, target: Target, settings: dict[str, Any], definitions: dict[str, str],
    machine: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """What `run.json` holds: enough to know what was measured, and to do it again."""
    import shlex
    import sys
    from datetime import UTC, datetime

    return {
        "benchmark": name,
        "command": shlex.join(["stretto", *sys.argv[1:]]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": target.name,
        "engine": target.engine.name,
        "dtype": target.dtype,
        "settings": settings,
        "machine": machine,
        "definitions": definitions,
    }


def _save(
    out: Path, rows: list[dict[str, Any]], records: list[dict[str, Any]], figure: Figure,
    run: dict[str, Any],
) -> None:  # fmt: skip
    from stretto.bench.report import save

    save(out, rows, records, figure, run)
    _progress(f"wrote {out}")


def _progress(line: str) -> None:
    from stretto.cli.output import say

    say(line)


def _print(result: object, text: str) -> None:
    """The result as JSON if there is one, else the text."""
    from stretto.cli.output import write_json, write_text

    if result is None:
        write_text(text + "\n")
    else:
        write_json(result)
