"""`stretto trace export`: a recorded answer for other programs. Needs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="A file of `run --trace`.")],
    *,
    chrome: Annotated[
        bool, typer.Option("--chrome", help="Chrome's trace events, which Perfetto opens.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write here; by default to stdout.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --out, print one JSON object of counts.")
    ] = False,
) -> None:
    """Turn a trace file into what other programs open."""
    from stretto.cli import output
    from stretto.errors import InvalidInput

    if not chrome:
        raise InvalidInput("no format is named; --chrome is the one there is")
    if out is not None:
        output.check_writable(out, "--out")
    from stretto.cli.trace_chrome import chrome_trace
    from stretto.cli.trace_read import read_recorded

    recorded = read_recorded(file)
    made = chrome_trace(recorded)
    data = output.json_bytes(made)
    if out is None:
        output.write_bytes(data)
        return
    output.write_file(out, data)
    counts = {
        "file": str(out),
        "num_events": len(made["traceEvents"]),
        "num_threads": len(recorded.trace.threads),
    }
    if as_json:
        output.write_json(counts)
    else:
        output.say(f"{counts['num_events']} events of {counts['num_threads']} threads in {out}")
