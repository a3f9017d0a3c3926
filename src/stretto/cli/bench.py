"""`stretto bench`: measure the runtime on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stretto.bench.program import Target

app = typer.Typer(no_args_is_help=True, help="Measure the runtime on this machine.")

Model = Annotated[
    str | None, typer.Option(help="A name, folder, .gguf file or hub org/model.", metavar="NAME")
]
DType = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="cpu, or a torch device such as cuda.")]
Threads = Annotated[int | None, typer.Option(help="torch threads; as many as torch takes.")]
Pairs = Annotated[int, typer.Option(help="Interleaved pairs after the warm-up; 7 or more.")]
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
    model: Model = None,
    dtype: DType = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time k forks of n forced tokens against the same tokens one after the other."""
    counts = _numbers("--forks", forks)
    _check(tokens=tokens, pairs=pairs, prompt_tokens=prompt_tokens, threads=threads)
    _prepare(out)
    longest = prompt_tokens + 1 + max(counts) * (tokens + 1)
    target = _load(model, dtype, device, threads, longest)
    from stretto.bench import report
    from stretto.bench.forks import DEFINITIONS, measure
    from stretto.bench.machine import describe_machine

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
    model: Model = None,
    dtype: DType = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time one pass for r rows against one row; scheduler time; share of memory bandwidth."""
    counts, contexts = _numbers("--rows", rows), _numbers("--context", context, low=2)
    _check(pairs=pairs, threads=threads)
    _prepare(out)
    from stretto.bench import report
    from stretto.bench.bookkeeping import DEFINITIONS as COUNTED
    from stretto.bench.bookkeeping import count_bookkeeping
    from stretto.bench.machine import describe_machine, read_bandwidth
    from stretto.bench.step import DEFINITIONS, NUM_PASSES, measure, with_bandwidth

    slots = max(contexts) + max(counts) * (NUM_PASSES + 2)
    target = _load(model, dtype, device, threads, slots)
    before = read_bandwidth(device)
    summary, records = measure(
        target, counts, contexts, num_pairs=pairs, seed=seed, report=_progress
    )
    bandwidth = max(before, read_bandwidth(device))
    summary = with_bandwidth(summary, target.weight_bytes, bandwidth)
    measured = {"read_bytes_per_s": round(bandwidth), "weight_bytes": target.weight_bytes}
    machine = describe_machine(device) | measured | {"dtype": target.dtype}
    bookkeeping = count_bookkeeping(counts)
    settings = {"rows": counts, "context": contexts, "pairs": pairs, "seed": seed}
    run = _run("step", target, settings, DEFINITIONS | COUNTED, machine)
    if out is not None:
        run["bookkeeping"] = bookkeeping
        _save(out, summary, records, report.plot_step(summary), run)
    result = {"rows": summary, "machine": machine, "bookkeeping": bookkeeping}
    tables = [report.format_table(summary), _bandwidth_line(bandwidth, target.weight_bytes)]
    tables += ["counted without a model:", report.format_table(bookkeeping)]
    _print(result if as_json else None, "\n\n".join(tables))


def _bandwidth_line(bandwidth: float, weight_bytes: int | None) -> str:
    read = "" if weight_bytes is None else f"; a pass reads {weight_bytes / 1e6:.0f} MB of weights"
    return f"measured read bandwidth {bandwidth / 1e9:.1f} GB/s{read}"


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


def _load(model: str | None, dtype: str, device: str, threads: int | None, slots: int) -> Target:
    """The model in an engine with room for at least `slots`, and torch set to `threads`."""
    import torch

    from stretto.bench.program import Target
    from stretto.lm import DEFAULT_POOL_SLOTS, LM

    if threads is not None:
        torch.set_num_threads(threads)
    pool_slots = max(DEFAULT_POOL_SLOTS, slots)
    return Target.of(LM.load(model, dtype=dtype, device=device, pool_slots=pool_slots))


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
    typer.echo(line, err=True)


def _print(result: object, text: str) -> None:
    """The result as JSON if there is one, else the text."""
    import json

    typer.echo(text if result is None else json.dumps(result))
