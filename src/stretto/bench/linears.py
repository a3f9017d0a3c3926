"""How near the linear layers alone come to the bandwidth of memory, for one row."""

from __future__ import annotations

import time
from typing import Any

from stretto.bench.pairs import bootstrap_median, rounded

NUM_SWEEPS = 25

DEFINITIONS = {
    "linear": "all linear layers of a pass of one row, output head included, one after the other "
    f"in one call and nothing between them; median of {NUM_SWEEPS} calls after a warm-up; null for "
    "an engine that cannot run them alone",
    "linear_share": "weight bytes / time of a call / read_bytes_per_s, with a percentile "
    "bootstrap 95% interval over calls; above 1 where the kernels read faster than the sum that "
    "read_bytes_per_s is measured with",
}


def measure(engine: Any, bandwidth: float, seed: int) -> dict[str, Any] | None:
    """Time and share of `bandwidth`, in bytes per second, of one row through all linear layers."""
    multiply_only = getattr(engine, "multiply_only", None)
    if multiply_only is None:
        return None
    times = []
    for _ in range(NUM_SWEEPS + 3):
        start = time.perf_counter()
        multiply_only(1)
        times.append(time.perf_counter() - start)
    times = times[3:]
    share = bootstrap_median([engine.weight_bytes / t / bandwidth for t in times], seed)
    return rounded(
        {
            "linear_bytes": engine.weight_bytes,
            "linear_ms": 1000 * sorted(times)[len(times) // 2],
            "linear_share": share.median,
            "linear_low": share.low,
            "linear_high": share.high,
        }
    )
