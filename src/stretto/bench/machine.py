"""What ran where: hardware, versions, and how fast this process reads memory."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

PACKAGES = ("stretto-lm", "torch", "transformers", "tokenizers", "numpy")
FEATURES = (
    "avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
"""CPU features that decide how fast a model runs."""
ROOT = Path(__file__).parents[3]
WRITTEN = (":(exclude)docs", ":(exclude)benchmarks/results")
"""What one benchmark after the other changes in a checkout, and no benchmark depends on."""
VARIABLES = ("STRETTO_", "OMP_")
"""Beginnings of the names of environment variables that are told."""
BUFFER_BYTES = 512 * 2**20
NUM_READS = 9
MATMUL_SIZE = 1024
NUM_MATMULS = 9
MATMUL_DTYPES = ("float32", "bfloat16")


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Hardware, threads, versions, and what may change how fast a model runs. Reads files, runs
    `git`, and loads the kernels if they can be had; measures nothing."""
    import torch

    processor = cpu()
    facts: dict[str, Any] = {
        "cpu": processor["name"],
        "features": processor["features"],
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "device": device,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
        "kernels": _kernels(),
        "environment": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)
        },
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast this process reads memory, in bytes per second, and multiplies, in FLOPs."""

    read_bytes_per_s: int
    matmul_flops: int

    @classmethod
    def measured(cls, dtype: str, device: str) -> Self:
        return cls(round(read_bandwidth(device)), round(matmul_peak(dtype, device)))

    def faster(self, other: Self) -> Self:
        """The higher one of each."""
        return type(self)(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.matmul_flops, other.matmul_flops),
        )


def read_bandwidth(device: str = "cpu") -> float:
    """Bytes per second of a streaming read: the fastest of several sums over a float32 buffer
    of 512 MiB, with as many torch threads as the process uses now."""
    import torch

    buffer = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(NUM_READS):
        start = time.perf_counter()
        float(buffer.sum())  # `float` waits for a GPU
        times.append(time.perf_counter() - start)
    return BUFFER_BYTES / min(times)


def matmul_dtype(dtype: str) -> str:
    """The dtype whose matmul is the peak for weights of `dtype`: its own, or bfloat16 for what is
    stored smaller and no float matmul takes."""
    return dtype if dtype in MATMUL_DTYPES else "bfloat16"


def matmul_peak(dtype: str, device: str = "cpu") -> float:
    """FLOPs per second of the fastest of several products of two square matrices of
    `MATMUL_SIZE` in `matmul_dtype(dtype)`, with as many torch threads as the process uses now."""
    import torch

    kind = getattr(torch, matmul_dtype(dtype))
    a = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=kind, device=device)
    times = []
    for _ in range(NUM_MATMULS):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # `float` waits for a GPU
        times.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / min(times)


def cpu() -> dict[str, Any]:
    """Name, cores that this process may use, and features of the CPU."""
    fields: dict[str, str] = {}
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(errors="replace").split("\n\n", maxsplit=1)[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "features": [name for name in FEATURES if name in flags],
    }


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _kernels() -> dict[str, dict[str, Any]]:
    """By instruction set, of each kernels' library that weights run by here: which weights, the
    hash of its sources and flags, and where it is from."""
    from stretto.kernels import library
    from stretto.kernels.recipe import source_hash

    try:
        found = library.load_all()
    except library.KernelsUnavailable:
        return {}
    return {
        k.instructions: {
            "weights": list(k.weights),
            "source": source_hash(k.instructions),
            "origin": k.origin,
        }
        for k in found
    }


def _revision(root: Path = ROOT) -> str | None:
    """The commit of a source checkout, with `-dirty` if more of it was changed than is `WRITTEN`;
    None if installed."""
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "describe", "--always", "--abbrev=12")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
