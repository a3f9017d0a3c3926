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
    "from the other text's, neither of the two likelier than half; neither. Of `cache`: texts with "
    "the cache against those without",
    "ttft_p50_ms, ttft_p95_ms": "from sending a request to its first text, over requests",
    "gap_p50_ms, gap_p95_ms": "from each piece of text to the next, over all of them; what waits "
    "for its place in the document comes late, and in one piece",
    "tokens_per_s": "drawn tokens, annotations included, of a round over its seconds, from the "
    "first request to the last end; the median of rounds",
    "speedup, low, high": "tokens_per_s over that of one client in the same round: the median, "
    "with a bootstrap 95% interval over rounds",
    "pairs": "rounds; in each, every number of clients and its twin without a server come once, in "
    "alternating order",
    "forward_ms": "mean of a pass in the engine's forward; the median of rounds",
    "pass_ms": "mean of a pass, and of what the engine's thread does for the server until the "
    "next one; the median of rounds",
    "direct_pass_ms": "mean of a pass in one process without a server, for the same requests by "
    "the Python API, as many of them under way at once; the median of rounds",
    "direct_forward_ms": "forward_ms of that process",
    "pass_ratio, pass_low, pass_high": "pass_ms over direct_pass_ms in the same round: the median, "
    "with a bootstrap 95% interval over rounds; of `cache`, pass_ms over that without the cache",
    "direct_tokens_per_s": "tokens_per_s of that process; the median of rounds",
    "server_share": "between_share, loop_share and aside_share together: all that the server takes "
    "beside decoding, as if nothing of it ran while the engine computes; the median of rounds",
    "between_share": "what the engine's thread does for the server between passes, over the "
    "forward",
    "loop_share": "CPU time of the server's event loop, over the forward",
    "aside_share": "CPU time of the threads that prepare requests and count answers, over the "
    "forward",
    "scheduler_share": "what a pass does outside of the engine's forward, over the forward "
    "(sampling, masks, books)",
    "cached_share": "prompt tokens that were not computed, since an earlier prompt began with "
    "them, over all of them",
}
SPEEDUP_CLIENTS, LEAST_SPEEDUP = 16, 4.0
MOST_SHARE = 0.05
ENOUGH_ROUNDS = 7
GAUGES = {
    "passes": "stretto_pass_seconds_count",
    "pass_s": "stretto_pass_seconds_sum",
    "forward_s": "stretto_forward_seconds_total",
    "between_s": "stretto_between_passes_seconds_total",
    "loop_s": "stretto_event_loop_cpu_seconds_total",
    "aside_s": "stretto_thread_pool_cpu_seconds_total",
    "prompt_tokens": "stretto_prompt_tokens_total",
    "cached_tokens": "stretto_cached_prompt_tokens_total",
}
YES, NO, UNKNOWN = "yes", "no", "not measured"


def read_gauges(text: bytes) -> dict[str, float]:
    """What of Prometheus's text the figures need."""
    lines = dict(line.split(" ", 1) for line in text.decode().splitlines() if line[:1] != "#")
    return {name: float(lines[key]) for name, key in GAUGES.items()}


def summary(cells: dict[tuple[int, int], Row]) -> tuple[list[Row], list[Row]]:
    """A row a number of clients, and the raw rows of all requests, without their tokens; texts are
    kept once, and where they differ. `cells`: by round and clients, `seconds`, `gauges` (what they
    grew by), `seen`, and `direct`, what the same came to without a server."""
    rounds = sorted({number for number, _ in cells})
    alone = {row["request"]: row for row in reversed(_one(cells, rounds))}
    rows, records = [], []
    for clients in sorted({clients for _, clients in cells}):
        numbers = [number for number in rounds if (number, clients) in cells]
        own = [cells[number, clients] for number in numbers]
        seen = [row for cell in own for row in cell["seen"]]
        found = [compared(alone[row["request"]], row) for row in seen]
        ratios = [_speed(cells[n, clients]) / _speed(cells[n, 1]) for n in numbers]
        rows.append(
            {
                "clients": clients,
                **counted(seen, [kind for kind, _ in found]),
                **_latencies(seen),
                "tokens_per_s": float(np.median([_speed(cell) for cell in own])),
                **ratio_of(bootstrap_median(ratios, seed=clients), "speedup"),
                "pairs": len(own),
                **shares([cell["gauges"] for cell in own]),
                **_beside_direct(own, seed=clients),
            }
        )
        records += _records(clients, own, found, alone)
    return [rounded(row) for row in rows], records


def is_finished(row: Row) -> bool:
    return row["error"] is None and row["finish_reason"] in ("stop", "length")


def counted(seen: Sequence[Row], kinds: Sequence[str]) -> Row:
    """How many requests there were, and what became of them and their texts."""
    return {
        "requests": len(seen),
        "unfinished": sum(not is_finished(row) for row in seen),
        "same": kinds.count("same"),
        "near_ties": kinds.count("near tie"),
        "different": kinds.count("different"),
    }


def _one(cells: dict[tuple[int, int], Row], rounds: list[int]) -> list[Row]:
    """What one client was answered, the first round first."""
    return [row for number in rounds if (number, 1) in cells for row in cells[number, 1]["seen"]]


def _speed(cell: Row) -> float:
    return float(sum(row["drawn_tokens"] for row in cell["seen"]) / cell["seconds"])


def ratio_of(found: Interval, name: str, prefix: str = "") -> Row:
    return {name: found.median, f"{prefix}low": found.low, f"{prefix}high": found.high}


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


def pass_ms(gauges: Row) -> float:
    """Of the engine's thread: a pass, and what it does for the server until the next one."""
    return float((gauges["pass_s"] + gauges["between_s"]) / gauges["passes"] * 1e3)


def shares(gauges: Sequence[Row]) -> Row:
    """What the server and the scheduler take, over the engine's own time; medians of rounds."""

    def median(*names: str) -> float:
        return float(np.median([sum(g[name] for name in names) / g["forward_s"] for g in gauges]))

    return {
        "forward_ms": float(np.median([g["forward_s"] / g["passes"] * 1e3 for g in gauges])),
        "pass_ms": float(np.median([pass_ms(g) for g in gauges])),
        "server_share": median("between_s", "loop_s", "aside_s"),
        "between_share": median("between_s"),
        "loop_share": median("loop_s"),
        "aside_share": median("aside_s"),
        "scheduler_share": median("pass_s") - 1,
    }


def _beside_direct(own: Sequence[Row], seed: int) -> Row:
    direct = [cell["direct"] for cell in own]
    times = [found["pass_s"] / found["passes"] * 1e3 for found in direct]
    ratios = [pass_ms(cell["gauges"]) / ms for cell, ms in zip(own, times, strict=True)]
    speeds = [found["drawn_tokens"] / found["seconds"] for found in direct]
    return {
        "direct_forward_ms": float(
            np.median([found["forward_s"] / found["passes"] * 1e3 for found in direct])
        ),
        "direct_pass_ms": float(np.median(times)),
        **ratio_of(bootstrap_median(ratios, seed=seed), "pass_ratio", "pass_"),
        "direct_tokens_per_s": float(np.median(speeds)),
    }


def _records(
    clients: int, own: Sequence[Row], found: Sequence[tuple[str, float | None]],
    alone: dict[int, Row],
) -> list[Row]:  # fmt: skip
    records, left = [], iter(found)
    for number, cell in enumerate(own):
        for row in cell["seen"]:
            kind, gap = next(left)
            keeps_text = kind != "same" or row is alone[row["request"]]
            place = {"clients": clients, "round": number}
            records.append(record(place, row, kind, gap, keeps_text=keeps_text))
    return records


def record(place: Row, row: Row, kind: str, gap: float | None, *, keeps_text: bool) -> Row:
    """A raw row of a request, without its tokens."""
    left_out = ("tokens",) if keeps_text else ("text", "tokens")
    kept = {key: value for key, value in row.items() if key not in left_out}
    return {**place, **kept, "verdict": kind} | ({} if gap is None else {"gap": gap})


def verdicts(rows: Sequence[Row], cache: Sequence[Row]) -> dict[str, str]:
    """Which of what is to be shown was shown: `YES`, `NO`, or `UNKNOWN` where this run cannot tell.
    `rows`: of `summary`; `cache`: of the runs with and without prompts that are shared."""
    many = next((row for row in rows if row["clients"] == SPEEDUP_CLIENTS), None)
    faster = f"{SPEEDUP_CLIENTS} clients: at least {LEAST_SPEEDUP:g} times the tokens of one"
    is_told = many is not None and many["pairs"] >= ENOUGH_ROUNDS
    return {
        "all finished": _said(not any(row["unfinished"] for row in (*rows, *cache))),
        "texts as alone": _said(not any(row["different"] for row in rows)),
        "texts with shared prompts as without": _said(not any(row["different"] for row in cache)),
        faster: _said(many["low"] >= LEAST_SPEEDUP) if many and is_told else UNKNOWN,
        f"server below {MOST_SHARE:.0%} of the engine's time": _said(
            all(row["server_share"] < MOST_SHARE for row in rows)
        ),
    }


def _said(is_so: bool) -> str:
    return YES if is_so else NO


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
