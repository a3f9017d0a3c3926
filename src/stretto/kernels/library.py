"""The kernels' shared library: found as the package's build left it, or compiled on first use.

It has a plain C interface, called through ctypes, so that one library serves every version of
torch; it shares torch's OpenMP threads, so that the two never compete for cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stretto.errors import Unsupported

SOURCES = Path(__file__).parent / "csrc"
ABI = 1
COMPILE_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-fopenmp", "-w",
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mfma",
)  # fmt: skip
"""Linked without -fopenmp: the OpenMP that torch has loaded already must be the one in use."""

BASE_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
NEEDED = {
    "float32": BASE_FEATURES,
    "bfloat16": (*BASE_FEATURES, "avx512_bf16"),
    "int8": (*BASE_FEATURES, "avx512_vnni"),
}
"""CPU features that each kind of weights needs."""
WEIGHTS = tuple(NEEDED)
WITHOUT = "STRETTO_CPU_WITHOUT"
"""Environment variable: CPU features, between commas, to be treated as absent; `all` for none."""


class KernelsUnavailable(Unsupported):
    """The kernels cannot be used here; the message says why. Plain torch can."""


@dataclass(frozen=True)
class Kernels:
    """The loaded library and the kinds of weights that this CPU has instructions for."""

    library: ctypes.CDLL
    path: Path
    weights: tuple[str, ...]


def load() -> Kernels:
    """The kernels. Raises `KernelsUnavailable` if the CPU lacks instructions, or if there is
    neither a built library nor a compiler."""
    weights = supported_weights()
    if not weights:
        lacking = [f for f in BASE_FEATURES if f not in cpu_features()]
        raise KernelsUnavailable(
            f"this CPU has no {', '.join(lacking)}, which the CPU kernels need; use engine 'hf'"
        )
    path = _library_path()
    return Kernels(_open(path), path, weights)


def supported_weights() -> tuple[str, ...]:
    """Kinds of weights that this CPU has instructions for."""
    features = cpu_features()
    return tuple(kind for kind, needed in NEEDED.items() if features.issuperset(needed))


def cpu_features() -> frozenset[str]:
    """Features of this CPU, less those that `STRETTO_CPU_WITHOUT` takes away."""
    without = {name.strip() for name in os.environ.get(WITHOUT, "").split(",")}
    return frozenset() if "all" in without else _machine_features() - without


@cache
def _machine_features() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return frozenset()
    for line in path.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _library_path() -> Path:
    return _compiled()


def source_hash() -> str:
    """Of the C++ sources and the flags they are compiled with."""
    digest = hashlib.sha256(" ".join(COMPILE_FLAGS).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiled() -> Path:
    """The library compiled from the package's sources, in the cache. Whole or not there."""
    from stretto.models.cache import cache_root

    final = cache_root() / "kernels" / source_hash() / "stretto_cpu.so"
    if final.is_file():
        return final
    compiler = next((c for c in _compilers() if shutil.which(c)), None)
    if compiler is None:
        raise KernelsUnavailable("the CPU kernels are not built and there is no C++ compiler")
    scratch = final.with_name(f".{secrets.token_hex(4)}")
    try:
        scratch.mkdir(parents=True)
        built = scratch / "stretto_cpu.so"
        object_file = scratch / "api.o"
        for command in (
            [compiler, *COMPILE_FLAGS, "-c", str(SOURCES / "api.cpp"), "-o", str(object_file)],
            [compiler, "-shared", str(object_file), "-o", str(built)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise KernelsUnavailable(f"{compiler} cannot compile the CPU kernels: {done.stderr}")
        built.replace(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _compilers() -> list[str]:
    own = os.environ.get("CXX")
    return [own] if own else ["c++", "g++", "clang++"]


@cache
def _open(path: Path) -> ctypes.CDLL:
    import torch  # noqa: F401  # its OpenMP library must be loaded first

    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
    library.stretto_abi.restype = ctypes.c_int32
    if library.stretto_abi() != ABI:
        raise KernelsUnavailable(f"{path} is of another version of Stretto; delete it")
    library.stretto_pass.restype = None
    library.stretto_pass_bytes.restype = ctypes.c_int64
    library.stretto_linear.restype = None
    library.stretto_linear_bytes.restype = ctypes.c_int64
    return library
