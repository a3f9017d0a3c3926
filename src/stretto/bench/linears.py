"""How near the linear layers alone come to the bandwidth of memory, for one row."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stretto.bench.pairs import bootstrap_median, rounded

if TYPE_CHECKING:
    from stretto.kernels.pack import Packed

NUM_SWEEPS = 15

DEFINITIONS = {
    "linear": "all packed linear layers of a pass, output head included, one after the other for "
    f"one row in float32 and nothing between them; median of {NUM_SWEEPS} sweeps after a warm-up; "
    "null for an engine without packed layers",
    "linear_share": "weight bytes / time of a sweep / read_bytes_per_s, with a percentile "
    "bootstrap 95% interval over sweeps",
}


def packed_layers(engine: Any) -> list[Packed]:
    """The packed linear layers that an engine's pass reads, in its order; empty if it has none."""
    from stretto.kernels.linear import PackedLinear
    from stretto.kernels.pack import Packed

    kept = getattr(engine, "linears", None) or getattr(engine, "_kept", None) or ()
    layers = [layer for layer in kept if isinstance(layer, Packed)]
    model = getattr(engine, "model", None)
    if not layers and model is not None:
        layers = [m.packed for m in model.modules() if isinstance(m, PackedLinear)]
    return layers


def measure(engine: Any, bandwidth: float, seed: int) -> dict[str, Any] | None:
    """Time and share of `bandwidth`, in bytes per second, of one row through all linear layers."""
    layers = packed_layers(engine)
    if not layers:
        return None
    calls = [prepared(layer)[0] for layer in layers]
    times = [_sweep(calls) for _ in range(NUM_SWEEPS + 2)][2:]
    num_bytes = sum(layer.num_bytes for layer in layers)
    share = bootstrap_median([num_bytes / t / bandwidth for t in times], seed)
    return rounded(
        {
            "linear_bytes": num_bytes,
            "linear_ms": 1000 * sorted(times)[len(times) // 2],
            "linear_share": share.median,
            "linear_low": share.low,
            "linear_high": share.high,
        }
    )


def _sweep(calls: Sequence[Callable[[], None]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def prepared(layer: Packed) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """A call of the kernel that `stretto.kernels.linear.multiply` calls, with all arguments made
    before, so that Python's part is small; its row, and where the result is written."""
    from stretto.kernels import library
    from stretto.kernels.pack import KINDS

    kernels, threads = library.load().library, torch.get_num_threads()
    x, y = torch.randn(1, layer.in_features), torch.empty(1, layer.out_features)
    need = kernels.stretto_linear_bytes(
        ctypes.c_int64(1), ctypes.c_int64(layer.in_features), ctypes.c_int32(threads)
    )
    scratch, struct = torch.empty(need, dtype=torch.uint8), layer.struct()
    arguments = (
        ctypes.byref(struct),
        ctypes.c_int32(KINDS[layer.weights]),
        ctypes.c_int32(0),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(1),
        ctypes.c_void_p(y.data_ptr()),
        ctypes.c_void_p(scratch.data_ptr()),
        ctypes.c_int32(threads),
    )

    def call(kept: tuple[Any, ...] = (x, y, scratch, struct, layer)) -> None:
        kernels.stretto_linear(*arguments)

    return call, x, y
