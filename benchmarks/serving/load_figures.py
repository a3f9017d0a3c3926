"""What a load comes to: a row a number of clients, in a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from load_client import Row, compared

from stretto.bench.pairs import Interval, bootstrap_median, rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITIONS = {
    "clients": "clients that ask at once, each for its next answer when it has one",
    "requests": "requests of all rounds; the same ones in each round and for each number of "
    "clients",
    "unfinished": "requests that got an error, or no end",
    "same, near_ties, different": "texts against that of the first request of its kind that one "
    "client asked for: equal; equal up to a token whose log-probability differs by less than 0.001 "
    "from the other text's; neither",
    "ttft_p50_ms, ttft_p95_ms": "from sending a request to its first text, over requests",
    "gap_p50_ms, gap_p95_ms": "from each piece of text to the next, over all of them; what waits "
    "for its place in the document comes late, and in one piece",
    "tokens_per_s": "drawn tokens, annotations included, of a round over its seconds, from the "
    "first request to the last end; the median of rounds",
    "speedup, low, high": "tokens_per_s over that of one client in the same round: the median, "
    "with a bootstrap 95% interval over rounds",
    "server_share": "what the engine's thread does for the server between passes, over the passes; "
    "the median of rounds",
    "scheduler_share": "what a pass does outside of the engine's forward, over the forward "
    "(sampling, masks, books)",
    "loop_share": "CPU time of the server's event loop, over the passes: the most that it can take "
    "from them by holding the interpreter",
    "pass_ms": "mean of a pass; the median of rounds",
}
TARGETS = {"speedup": ("16 clients", 4.0), "server_share": ("each", 0.05)}
GAUGES = {
    "passes": "stretto_pass_seconds_count",
    "pass_s": "stretto_pass_seconds_sum",
    "forward_s": "stretto_forward_seconds",
    "between_s": "stretto_between_passes_seconds_total",
    "loop_s": "stretto_event_loop_cpu_seconds",
}


def read_gauges(text: bytes) -> dict[str, float]:
    """What of Prometheus's text the figures need."""
    lines = dict(line.split(" ", 1) for line in text.decode().splitlines() if line[:1] != "#")
    return {name: float(lines[key]) for name, key in GAUGES.items()}


def summary(cells: dict[tuple[int, int], Row]) -> tuple[list[Row], list[Row]]:
    """A row a number of clients, and the raw rows of all requests, without their tokens; texts are
    kept once, and where they differ. `cells`: by round and clients, `seconds`, `gauges` (what they
    grew by), `seen`."""
    rounds = sorted({number for number, _ in cells})
    alone = {row["request"]: row for row in reversed(_one(cells, rounds))}
    rows, records = [], []
    for clients in sorted({clients for _, clients in cells}):
        own = [cells[number, clients] for number in rounds if (number, clients) in cells]
        seen = [row for cell in own for row in cell["seen"]]
        verdicts = [compared(alone[row["request"]], row) for row in seen]
        ratios = [
            _speed(cells[number, clients]) / _speed(cells[number, 1])
            for number in rounds
            if (number, clients) in cells
        ]
        kinds = [kind for kind, _ in verdicts]
        rows.append(
            {
                "clients": clients,
                "requests": len(seen),
                "unfinished": sum(not is_finished(row) for row in seen),
                "same": kinds.count("same"),
                "near_ties": kinds.count("near tie"),
                "different": kinds.count("different"),
                **_latencies(seen),
                "tokens_per_s": float(np.median([_speed(cell) for cell in own])),
                **_ratio(bootstrap_median(ratios, seed=clients)),
                "rounds": len(own),
                **_shares([cell["gauges"] for cell in own]),
            }
        )
        records += _records(clients, own, verdicts, alone)
    return [rounded(row) for row in rows], records


def is_finished(row: Row) -> bool:
    return row["error"] is None and row["finish_reason"] in ("stop", "length")


def _one(cells: dict[tuple[int, int], Row], rounds: list[int]) -> list[Row]:
    """What one client was answered, the first round first."""
    return [row for number in rounds if (number, 1) in cells for row in cells[number, 1]["seen"]]


def _speed(cell: Row) -> float:
    return float(sum(row["drawn_tokens"] for row in cell["seen"]) / cell["seconds"])


def _ratio(found: Interval) -> Row:
    return {"speedup": found.median, "low": found.low, "high": found.high}


def _latencies(seen: Sequence[Row]) -> Row:
    values = {
        "ttft": [row["ttft_s"] for row in seen if row["ttft_s"] is not None],
        "gap": [gap for row in seen for gap in row["gaps_s"]],
    }
    return {
        f"{name}_p{q}_ms": float(np.percentile(found, q)) * 1e3 if found else None
        for name, found in values.items()
        for q in (50, 95)
    }


def _shares(gauges: Sequence[Row]) -> Row:
    def median(values: Sequence[float]) -> float:
        return float(np.median(values))

    return {
        "pass_ms": median([g["pass_s"] / g["passes"] * 1e3 for g in gauges]),
        "server_share": median([g["between_s"] / g["pass_s"] for g in gauges]),
        "scheduler_share": median([g["pass_s"] / g["forward_s"] - 1 for g in gauges]),
        "loop_share": median([g["loop_s"] / g["pass_s"] for g in gauges]),
    }


def _records(
    clients: int, own: Sequence[Row], verdicts: Sequence[tuple[str, float | None]],
    alone: dict[int, Row],
) -> list[Row]:  # fmt: skip
    found, left = [], iter(verdicts)
    for number, cell in enumerate(own):
        for row in cell["seen"]:
            kind, gap = next(left)
            kept = {key: value for key, value in row.items() if key not in ("text", "tokens")}
            if kind != "same" or row is alone[row["request"]]:
                kept["text"] = row["text"]
            record = {"clients": clients, "round": number, **kept, "verdict": kind}
            found.append(record | ({} if gap is None else {"gap": gap}))
    return found


def verdicts(rows: Sequence[Row]) -> dict[str, bool]:
    """Which of what is to be shown was shown."""
    met = {
        "all finished": not any(row["unfinished"] for row in rows),
        "texts as alone": not any(row["different"] for row in rows),
    }
    place, least = TARGETS["speedup"]
    for row in rows:
        if f"{row['clients']} clients" == place:
            met[f"{place}: at least {least:g} times the tokens of one"] = row["speedup"] >= least
    most = TARGETS["server_share"][1]
    met[f"server below {most:.0%} of a pass"] = all(row["server_share"] < most for row in rows)
    return met


def plot(rows: Sequence[Row]) -> Figure:
    """Tokens per second, and how long clients wait, by their number."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = [row["clients"] for row in rows]
    y = [row["speedup"] for row in rows]
    errors = [[row["speedup"] - row["low"] for row in rows],
              [row["high"] - row["speedup"] for row in rows]]  # fmt: skip
    left.errorbar(x, y, yerr=errors, marker="o", capsize=3)
    left.set(xlabel="clients", ylabel="tokens per second / those of one client")
    left.set_ylim(bottom=0)
    for name, label in (("ttft", "to the first text"), ("gap", "from text to text")):
        for q, style in ((50, "o-"), (95, "x--")):
            values: list[Any] = [row[f"{name}_p{q}_ms"] for row in rows]
            right.plot(x, values, style, label=f"{label}, p{q}")
    right.set(xlabel="clients", ylabel="milliseconds", yscale="log")
    right.legend(fontsize="x-small")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(x)
        axes.xaxis.set_major_formatter("{x:g}")
    return figure
