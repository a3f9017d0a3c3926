"""What it costs to share what prompts begin with, where they begin alike in the template alone:
a server that shares against one that does not, the same distinct prompts, never asked before."""

from __future__ import annotations

from collections.abc import Sequence

from load_client import Ask, Row, asks_of, compared
from load_figures import counted, pass_ms, ratio_of, record, shares

from stretto.bench.pairs import bootstrap_median, rounded

CLIENTS = 16
SIDES = ("off", "on")


def distinct(prompts: Sequence[str], count: int, number: int) -> list[Ask]:
    """So many requests of a round, no prompt of which comes in another one."""
    first = number * count
    own = [f"Note {n}. {prompts[n % len(prompts)]}" for n in range(first, first + count)]
    return asks_of(own, count)


def summary(cells: dict[tuple[int, str], Row]) -> tuple[list[Row], list[Row]]:
    """A row for each of `SIDES`, and the raw rows of all requests. `cells`: by round and side."""
    rounds = sorted({number for number, _ in cells})
    rows, records = [], []
    for side in SIDES:
        seen, kinds, ratios = [], [], []
        for number in rounds:
            plain, own = cells[number, "off"], cells[number, side]
            ratios.append(pass_ms(own["gauges"]) / pass_ms(plain["gauges"]))
            for reference, row in zip(plain["seen"], own["seen"], strict=True):
                kind, gap = compared(reference, row)
                place = {"clients": CLIENTS, "round": number, "cache": side}
                keeps_text = side == "off" or kind != "same"
                records.append(record(place, row, kind, gap, keeps_text=keeps_text))
                seen.append(row)
                kinds.append(kind)
        gauges = [cells[number, side]["gauges"] for number in rounds]
        rows.append(
            {
                "cache": side,
                "clients": CLIENTS,
                **counted(seen, kinds),
                "cached_share": _cached(gauges),
                **shares(gauges),
                **ratio_of(bootstrap_median(ratios, seed=0), "pass_ratio", "pass_"),
                "pairs": len(rounds),
            }
        )
    return [rounded(row) for row in rows], records


def _cached(gauges: Sequence[Row]) -> float:
    total = sum(found["prompt_tokens"] for found in gauges)
    return float(sum(found["cached_tokens"] for found in gauges) / total) if total else 0.0
