"""`stretto bench weights`: what rounded weights cost in quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import bench_parts as parts
from stretto.cli import options
from stretto.cli.bench_parts import AsJson, Out, Place
from stretto.models.embedded import EMBEDDED_MODEL
from stretto.params import MAX_SEED

if TYPE_CHECKING:
    from stretto.bench.program import Target
    from stretto.lm import LM

Field = Annotated[str | None, typer.Option(metavar="NAME", help="Of JSON lines: the text's field.")]


def bench_weights(
    *,
    texts: Annotated[Path, typer.Option(metavar="FILE", help="UTF-8 text, or JSON lines.")],
    field: Field = None,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    limit: Annotated[int, typer.Option(help="Most windows.")] = 64,
    model: options.Model = EMBEDDED_MODEL,
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the bootstrap.")] = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Compare perplexity and greedy choices of rounded weights with those in float32."""
    parts.check(low=2, window=window)
    parts.check(limit=limit, threads=threads)
    from stretto.bench import weights

    found = weights.read_texts(texts, field)
    parts.prepare(out)
    lms = dict(_sides(model, window, seed, threads))
    encode = lms[weights.REFERENCE].vocabulary.encode
    windows = weights.windows_of([encode(text) for text in found], window, limit)
    engines = {side: lm.engine for side, lm in lms.items()}
    scores = weights.score(engines, windows, parts.progress)
    from stretto.bench.program import Target
    from stretto.bench.report import format_table

    target = Target.of(lms[weights.REFERENCE])
    sizes = {side: Target.of(lm).weight_bytes or 0 for side, lm in lms.items()}
    rows = weights.summarise(scores, window, sizes, seed)
    if out is not None:
        settings: dict[str, Any] = {"texts": texts.name, "sha256": _sha256(texts), "field": field}
        settings |= {"window": window, "limit": limit, "windows": len(windows), "seed": seed}
        _save(out, target, settings, rows, weights.records_of(scores, window))
    parts.show(rows if as_json else None, format_table(rows))


def _sides(model: str, window: int, seed: int, threads: int | None) -> list[tuple[str, LM]]:
    """Each side's model; those that cannot run here are named and left out."""
    from stretto.bench.weights import REFERENCE, SIDES
    from stretto.errors import Unsupported

    lms = []
    for side in SIDES:
        engine, dtype = side.split()
        place = Place.of(model, False, seed, dtype=dtype, engine=engine, threads=threads)
        parts.progress(f"loading {side}")
        try:
            lms.append((side, place.lm()))
        except Unsupported as error:
            if side == REFERENCE:
                raise
            parts.progress(f"{side} is left out: {error}")
    return lms


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def _save(
    out: Path, target: Target, settings: dict[str, Any], rows: list[dict[str, Any]],
    records: list[dict[str, Any]],
) -> None:  # fmt: skip
    from stretto.bench import report, weights
    from stretto.bench.machine import describe_machine

    machine = describe_machine(target.device)
    run = parts.describe("weights", target, settings, weights.DEFINITIONS, machine)
    parts.save(out, rows, records, report.plot_weights(rows), run, raw="windows")
