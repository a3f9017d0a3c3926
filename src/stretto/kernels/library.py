"""The kernels' shared library: found as the package's build left it, or compiled on first use.

It has a plain C interface, called through ctypes, so that one library serves every version of
torch; it shares torch's OpenMP threads, so that the two never compete for cores.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stretto.errors import UnknownName, Unsupported
from stretto.kernels.recipe import LIBRARY, CompileFailed, is_for, source_hash

if TYPE_CHECKING:
    from stretto.models.progress import Report

BASE_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
NEEDED = {
    "float32": BASE_FEATURES,
    "bfloat16": (*BASE_FEATURES, "avx512_bf16"),
    "int8": (*BASE_FEATURES, "avx512_vnni"),
}
"""CPU features that each kind of weights needs."""
WEIGHTS = tuple(NEEDED)
FEATURES = (*BASE_FEATURES, "avx512_bf16", "avx512_vnni")

SWITCH = "STRETTO_KERNELS"
"""Environment variable: `off` switches the kernels off; `on` is the default."""
SWITCHES = {
    "": True, "on": True, "1": True, "true": True, "yes": True,
    "off": False, "0": False, "false": False, "no": False,
}  # fmt: skip
WITHOUT = "STRETTO_CPU_WITHOUT"
"""Environment variable: CPU features, between commas, to be treated as absent; `all` for none."""
WAY_OUT = "use engine 'hf'"


WHAT_COMPILES = ("CXX", "PATH", "STRETTO_CACHE")
"""Environment variables that decide whether compiling can succeed."""


class KernelsUnavailable(Unsupported):
    """The kernels cannot be used here; the message says why, in one line. Plain torch can."""

    def __init__(self, reason: str, way_out: str | None = None) -> None:
        super().__init__(reason if way_out is None else f"{reason}; {way_out}")
        self.reason = reason
        self.way_out = way_out


_outcomes: dict[tuple[str, ...], Kernels | KernelsUnavailable] = {}
"""What was found in this process. Failures too: a compiler is not asked twice."""


@dataclass(frozen=True)
class Kernels:
    """The loaded library and the kinds of weights that this CPU has instructions for."""

    library: ctypes.CDLL
    path: Path
    weights: tuple[str, ...]
    origin: Literal["package", "cache"]


def load(report: Report | None = None) -> Kernels:
    """The kernels, compiled first if need be, which takes some ten seconds and is told to `report`.

    Raises `KernelsUnavailable` if they are switched off, if the CPU lacks instructions, or if
    there is neither a built library nor a compiler that can build one; and `UnknownName` if an
    environment variable makes no sense.
    """
    switch, without = os.environ.get(SWITCH, ""), os.environ.get(WITHOUT, "")
    key = (switch, without, *(os.environ.get(name, "") for name in WHAT_COMPILES))
    if key not in _outcomes:
        try:
            _outcomes[key] = _load(switch, without, report)
        except KernelsUnavailable as error:
            _outcomes[key] = error
    outcome = _outcomes[key]
    if isinstance(outcome, KernelsUnavailable):
        raise KernelsUnavailable(outcome.reason, outcome.way_out) from outcome.__cause__
    return outcome


def loaded() -> ctypes.CDLL | None:
    """The library if something in this process has loaded it; loads and compiles nothing."""
    found = (outcome.library for outcome in _outcomes.values() if isinstance(outcome, Kernels))
    return next(found, None)


@cache
def handle() -> ctypes.CDLL:
    """The library, for what was packed while it could be had: quicker than `load`."""
    return load().library


def is_on(switch: str | None = None) -> bool:
    """Whether `STRETTO_KERNELS`, or the value given, leaves the kernels on."""
    value = os.environ.get(SWITCH, "") if switch is None else switch
    word = value.strip().lower()
    if word not in SWITCHES:
        raise UnknownName(SWITCH, value, ["on", "off"])
    return SWITCHES[word]


def supported_weights() -> tuple[str, ...]:
    """Kinds of weights that this CPU has instructions for."""
    return tuple(kind for kind in WEIGHTS if kind not in lacking())


def lacking() -> dict[str, tuple[str, ...]]:
    """For each kind of weights that this CPU cannot run, the features that it lacks."""
    features = cpu_features()
    missing = {kind: tuple(f for f in NEEDED[kind] if f not in features) for kind in WEIGHTS}
    return {kind: names for kind, names in missing.items() if names}


def by_name() -> str:
    """The environment variable that takes features away, if it does, for messages."""
    without = os.environ.get(WITHOUT, "")
    return f" ({WITHOUT}={without})" if without else ""


def cpu_features() -> frozenset[str]:
    """Features of this CPU, less those that `STRETTO_CPU_WITHOUT` takes away."""
    words = os.environ.get(WITHOUT, "").split(",")
    without = {word.strip() for word in words} - {""}
    for name in sorted(without - {"all", *FEATURES}):
        raise UnknownName(f"CPU feature in {WITHOUT}", name, ["all", *FEATURES])
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


def _load(switch: str, without: str, report: Report | None) -> Kernels:
    if not is_on(switch):
        raise KernelsUnavailable(
            f"the CPU kernels are switched off by {SWITCH}={switch}",
            f"unset {SWITCH}, or {WAY_OUT}",
        )
    platform = sysconfig.get_platform()
    if not is_for(platform):
        raise KernelsUnavailable(
            f"the CPU kernels are for Linux on x86-64, and this is {platform}", WAY_OUT
        )
    weights = supported_weights()
    if not weights:
        names = ", ".join(lacking()["float32"])
        raise KernelsUnavailable(
            f"this CPU has no {names}, which the CPU kernels need{by_name()}", WAY_OUT
        )
    packaged = Path(__file__).with_name(LIBRARY)
    if _why_not(packaged) is None:
        return Kernels(_open(packaged), packaged, weights, "package")
    from stretto.kernels.first_use import compiled

    try:
        path = compiled(_why_not, report)
    except CompileFailed as error:
        raise KernelsUnavailable(
            f"the CPU kernels cannot be compiled: {error}", f"{error.way_out}, or {WAY_OUT}"
        ) from error
    return Kernels(_open(path), path, weights, "cache")


def _why_not(path: Path) -> str | None:
    """Why a library cannot be used, None if it can. One of other sources is not even loaded."""
    try:
        if source_hash().encode() not in path.read_bytes():
            return f"{path} was built from other sources"
        _open(path)
    except (OSError, AttributeError) as error:
        return " ".join(str(error).split())
    return None


def _open(path: Path) -> ctypes.CDLL:
    import torch  # noqa: F401  # its OpenMP library must be loaded first

    library = ctypes.CDLL(str(path))
    library.stretto_pass.restype = None
    library.stretto_pass_bytes.restype = ctypes.c_int64
    library.stretto_linear.restype = None
    library.stretto_linear_bytes.restype = ctypes.c_int64
    library.stretto_peak.restype = ctypes.c_float
    return library
