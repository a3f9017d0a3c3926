"""Results as an aligned table, and as a folder: raw records, summary, picture, and `run.json`."""

from __future__ import annotations

import csv
import io
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import InvalidInput
from stretto.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]


def format_table(rows: Rows) -> str:
    """Aligned columns under their names; all rows have the first one's keys. Empty for no rows."""
    if not rows:
        return ""
    header = list(rows[0])
    lines = [header, *([_cell(row[key]) for key in header] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def prepare_folder(out: Path) -> None:
    """Makes the folder before anything is measured. Raises `InvalidInput` if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidInput(
            f"cannot write to --out {str(out)!r} ({error.strerror}); name another folder"
        ) from None


def save(
    out: Path, rows: Rows, records: Rows, figure: Figure, run: dict[str, Any], *,
    raw: str = "pairs", **tables: Rows,
) -> None:  # fmt: skip
    """Writes `pairs.jsonl` (or `raw`), `summary.csv`, `plot.png` and `run.json`, each atomically,
    and a CSV file per further table.

    `run.json` comes last: a folder that has it is complete.
    """
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    write_atomically(out / f"{raw}.jsonl", "".join(lines).encode())
    for name, table in {"summary": rows, **tables}.items():
        write_atomically(out / f"{name}.csv", to_csv(table).encode())
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomically(out / "plot.png", picture.getvalue())
    text = json.dumps(run, ensure_ascii=False, indent=2) + "\n"
    write_atomically(out / "run.json", text.encode())


def to_csv(rows: Rows) -> str:
    """All rows under the first one's keys; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plot_forks(rows: Rows) -> Figure:
    """Realized and theoretical speed-up by number of forks."""
    figure, axes = _figure("forks", "speed-up over one thread")
    forks = [row["forks"] for row in rows]
    axes.plot(forks, [row["theoretical"] for row in rows], "--", color="gray", label="theoretical")
    _errors(axes, forks, rows, "realized", "realized (median, 95% interval)")
    return _finished(figure, axes, forks)


def plot_step(rows: Rows) -> Figure:
    """Cost of a pass over that of one row, by rows, a line per context."""
    figure, axes = _figure("rows in a pass", "time of a pass / with one row")
    for context in dict.fromkeys(row["context"] for row in rows):
        own = [row for row in rows if row["context"] == context]
        _errors(axes, [row["rows"] for row in own], own, "ratio", f"context {context}")
    axes.axhline(1, linestyle="--", color="gray")
    return _finished(figure, axes, list(dict.fromkeys(row["rows"] for row in rows)))


def plot_peers(rows: Rows) -> Figure:
    """Our speed over each peer's, by number of sequences, a line per peer and own dtype."""
    figure, axes = _figure("sequences", "our tokens per second / the peer's")
    for context, ours, peer in dict.fromkeys((r["context"], r["ours"], r["peer"]) for r in rows):
        own = [r for r in rows if (r["context"], r["ours"], r["peer"]) == (context, ours, peer)]
        label = f"{ours.removeprefix('stretto ')} / {peer}, context {context}"
        _errors(axes, [row["rows"] for row in own], own, "ratio", label)
    axes.axhline(1, linestyle="--", color="gray")
    figure = _finished(figure, axes, list(dict.fromkeys(row["rows"] for row in rows)))
    axes.legend(fontsize="x-small")
    return figure


def plot_scale(rows: Rows) -> Figure:
    """Time of a token by number of threads, a line per context and pool, copying dashed."""
    figure, axes = _figure("threads", "milliseconds a token")
    places = dict.fromkeys((row["pool_slots"], row["context"]) for row in rows)
    pools = {pool for pool, _ in places}
    for number, (pool, context) in enumerate(places):
        own = [r for r in rows if (r["pool_slots"], r["context"]) == (pool, context)]
        label = f"context {context}" + (f", {pool} slots" if len(pools) > 1 else "")
        x, color = [r["threads"] for r in own], f"C{number}"
        axes.plot(x, [r["token_ms"] for r in own], marker="o", label=label, color=color)
        copied = [r for r in own if r["copy_token_ms"] is not None]
        if copied:
            y = [r["copy_token_ms"] for r in copied]
            axes.plot(
                [r["threads"] for r in copied],
                y,
                "x--",
                label=f"{label}, batch of copies",
                color=color,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(dict.fromkeys(r["threads"] for r in rows)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="x-small")
    return figure


def plot_e2e(rows: Rows) -> Figure:
    """Realized against theoretical speed-up, a dot a prompt, by whether it had many threads."""
    from stretto.bench.e2e import MANY, has_many

    figure, axes = _figure("theoretical speed-up", "realized speed-up")
    for label, marker, is_many in ((f"{MANY} threads or more", "o", True), ("fewer", "x", False)):
        own = [r for r in rows if r["realized"] and has_many(r) == is_many]
        x, y = [r["theoretical"] for r in own], [r["realized"] for r in own]
        axes.scatter(x, y, marker=marker, label=f"{label} ({len(own)} prompts)")
    axes.axhline(1, linestyle="--", color="gray")
    axes.axline((1, 1), slope=1, linestyle=":", color="gray", label="realized = theoretical")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def plot_weights(rows: Rows) -> Figure:
    """Perplexity over that of the reference, a point a side."""
    figure, axes = _figure("", "perplexity / that of hf float32")
    x = list(range(len(rows)))
    _errors(axes, x, rows, "ratio", "mean over windows, 95% interval")
    axes.lines[0].set_linestyle("none")
    axes.set_xticks(x, [row["side"].replace(" ", "\n") for row in rows])
    axes.axhline(1, linestyle="--", color="gray")
    axes.legend()
    return figure


def _figure(x: str, y: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    return figure, axes


def _finished(figure: Figure, axes: Any, ticks: list[int]) -> Figure:
    axes.set_ylim(bottom=0)
    axes.set_xticks(ticks)
    axes.legend()
    return figure


def _errors(axes: Any, x: list[int], rows: Rows, key: str, label: str) -> None:
    y = [row[key] for row in rows]
    below = [row[key] - row["low"] for row in rows]
    above = [row["high"] - row[key] for row in rows]
    axes.errorbar(x, y, yerr=[below, above], marker="o", capsize=3, label=label)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
