"""What `stretto doctor` measures of this machine and installation. Imports torch when called."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "stretto-lm"


def versions() -> dict[str, str | None]:
    """Installed versions by package name; None for one that is not there."""
    names = (DISTRIBUTION, "torch", "transformers", "tokenizers", "safetensors", "numpy")
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def unmet_requirements() -> Iterator[str]:
    """Each of our dependencies that is missing or of a version we do not run with, in words."""
    from packaging.requirements import Requirement

    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed, {requirement.specifier} is needed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, {requirement.specifier} is needed"


def free_memory_bytes() -> int | None:
    """Memory that can still be had: the machine's, or less under a limit. None if unknown."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = (
        _number(Path("/sys/fs/cgroup") / f"memory.{name}") for name in ("max", "current")
    )
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def cuda_devices() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append({"name": facts.name, "memory_bytes": facts.total_memory})
    return found


def check_engine(dtype: str) -> None:
    """Builds the engine on a tiny random model; it must honour masks. Raises if it does not."""
    from stretto.engines.hf import HFEngine

    HFEngine(_tiny_model(dtype), num_slots=8)


def automatic_engine(dtype: str) -> str:
    """The engine that `auto` is here, for a Llama on the CPU in `dtype`. It is built, so it raises
    if it does not honour what a row may see."""
    from stretto.engines.choose import AUTO, make_engine

    return make_engine(AUTO, _tiny_model(dtype), num_slots=8, weights=dtype, owned=True).name


def _tiny_model(dtype: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


KERNEL_ERRORS = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 5e-2}
"""Largest deviation from float32 of a packed layer on 128 inputs, per largest output."""


def check_kernels(weights: Sequence[str]) -> None:
    """Runs a small packed layer of each kind. Raises `ValueError` if a result is wrong."""
    import torch

    from stretto.kernels.linear import PackedLinear

    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(128, 48), torch.randn(3, 128)
        right = layer(x)
        for kind in weights:
            error = float((PackedLinear(layer, kind)(x) - right).abs().max() / right.abs().max())
            if not error <= KERNEL_ERRORS[kind]:
                raise ValueError(f"a {kind} layer is wrong by {error:.1%} of its largest output")
