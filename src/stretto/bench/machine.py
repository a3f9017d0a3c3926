"""What ran where: hardware, versions, and how fast this process reads memory."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("stretto-lm", "torch", "transformers", "tokenizers", "numpy")
BUFFER_BYTES = 512 * 2**20
NUM_READS = 9


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Hardware, threads and versions. Reads files and runs `git`; measures nothing."""
    import torch

    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": _num_cores(),
        "torch_threads": torch.get_num_threads(),
        "device": device,
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


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


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit of a source checkout, with `-dirty` if it was changed; None if installed."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
