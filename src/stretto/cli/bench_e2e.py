"""`stretto bench e2e`: a method against sequential decoding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import bench_parts as parts
from stretto.cli import options
from stretto.cli.bench_parts import AsJson, Out, Pairs, Place, Seed
from stretto.errors import SOME_FAILED
from stretto.models.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from stretto.bench.program import Target


def bench_e2e(
    *,
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="Prompts, one a line.")],
    method: options.Method = "auto",
    pairs: Pairs = 3,
    max_tokens: options.MaxTokens = 300,
    limit: Annotated[int | None, typer.Option(help="Only so many prompts.")] = None,
    model: options.Model = EMBEDDED_MODEL,
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
    target = Target.of(lm)
    journal = parts.start_journal(out, "e2e", place, settings, [target])
    params = SamplingParams(max_tokens=max_tokens)
    rows = e2e.measure(
        lm, texts, method, params=params, num_pairs=pairs, journal=journal, report=parts.progress
    )
    summary = [e2e.summary_of(row, method) for row in rows]
    result = {"rows": summary, "means": e2e.means_of(summary, seed)}
    if out is not None:
        settings |= {"prompts": str(prompts), "limit": limit}
        _save_e2e(out, target, settings, result, rows)
        journal.finish()
    parts.show(result if as_json else None, _e2e_text(result))
    if any("error" in row for row in rows):
        raise typer.Exit(SOME_FAILED)


def _save_e2e(
    out: Path, target: Target, settings: dict[str, Any], result: dict[str, Any],
    rows: list[dict[str, Any]],
) -> None:  # fmt: skip
    from stretto.bench import e2e, report
    from stretto.bench.machine import describe_machine

    machine = describe_machine(target.device)
    run = parts.describe("e2e", target, settings, e2e.DEFINITIONS, machine)
    run |= e2e.counts_of(result["rows"])
    figure = report.plot_e2e(result["rows"])
    parts.save(out, result["rows"], rows, figure, run, raw="rows", means=result["means"])


def _e2e_text(result: dict[str, Any]) -> str:
    from stretto.bench.report import format_table

    return "\n\n".join([format_table(result["rows"]), format_table(result["means"])])
