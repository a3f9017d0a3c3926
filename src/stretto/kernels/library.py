"""The kernels' shared libraries: found as the package's build left them, or compiled on first use.

There is one for each instruction set; a kind of weights runs by the widest that the CPU has all
of. They read the same packed weights. Each has a plain C interface, called through ctypes, so that
one library serves every version of torch; it shares torch's OpenMP threads, so that the two never
compete for cores.
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
from stretto.kernels.recipe import CompileFailed, is_for, library_name, source_hash

if TYPE_CHECKING:
    from stretto.models.progress import Report

WEIGHTS = ("float32", "bfloat16", "int8")
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
AVX2 = ("avx2", "fma")
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "avx512": {
        "float32": AVX512,
        "bfloat16": (*AVX512, "avx512_bf16"),
        "int8": (*AVX512, "avx512_vnni"),
    },
    "avx2": dict.fromkeys(WEIGHTS, AVX2),
}
"""CPU features that each kind of weights needs, by instruction set; the first that can is taken."""
FEATURES = (*AVX512, "avx512_bf16", "avx512_vnni", *AVX2)
NAMES = {"avx512": "AVX-512", "avx2": "AVX2"}

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
    """A loaded library, its instruction set, and the kinds of weights that run by it here."""

    library: ctypes.CDLL
    path: Path
    instructions: str
    weights: tuple[str, ...]
    origin: Literal["package", "cache"]


def load(weights: str = "float32", report: Report | None = None) -> Kernels:
    """The kernels for `weights`, compiled first if need be, which takes some ten seconds and is
    told to `report`.

    Raises `KernelsUnavailable` if they are switched off, if there are none for such weights, if
    the CPU lacks instructions, or if there is neither a built library nor a compiler that can build
    one; and `UnknownName` if an environment variable makes no sense.
    """
    instructions = _instructions_or_why_not(weights)
    key = (instructions, *(os.environ.get(name, "") for name in (WITHOUT, *WHAT_COMPILES)))
    if key not in _outcomes:
        try:
            _outcomes[key] = _find(instructions, report)
        except KernelsUnavailable as error:
            _outcomes[key] = error
    outcome = _outcomes[key]
    if isinstance(outcome, KernelsUnavailable):
        raise KernelsUnavailable(outcome.reason, outcome.way_out) from outcome.__cause__
    return outcome


def load_all(report: Report | None = None) -> list[Kernels]:
    """The kernels for all kinds of weights that run here. Raises what `load` raises."""
    found = [load(kind, report) for kind in supported_weights() or WEIGHTS[:1]]
    return list({kernels.instructions: kernels for kernels in found}.values())


def loaded() -> ctypes.CDLL | None:
    """A library if something in this process has loaded it; loads and compiles nothing."""
    found = (outcome.library for outcome in _outcomes.values() if isinstance(outcome, Kernels))
    return next(found, None)


@cache
def handle(weights: str) -> ctypes.CDLL:
    """The library, for what was packed while it could be had: quicker than `load`."""
    return load(weights).library


def is_on(switch: str | None = None) -> bool:
    """Whether `STRETTO_KERNELS`, or the value given, leaves the kernels on."""
    value = os.environ.get(SWITCH, "") if switch is None else switch
    word = value.strip().lower()
    if word not in SWITCHES:
        raise UnknownName(SWITCH, value, ["on", "off"])
    return SWITCHES[word]


def instructions_for(weights: str) -> str | None:
    """The instruction set that weights of this kind run by on this CPU, if there is one."""
    features = cpu_features()
    return next((name for name, of in NEEDED.items() if features.issuperset(of[weights])), None)


def supported_weights() -> tuple[str, ...]:
    """Kinds of weights that this CPU has instructions for."""
    return tuple(kind for kind in WEIGHTS if instructions_for(kind) is not None)


def lacking() -> dict[str, tuple[str, ...]]:
    """For each kind of weights that this CPU cannot run, the features that AVX2 would need."""
    missing = tuple(name for name in AVX2 if name not in cpu_features())
    return {kind: missing for kind in WEIGHTS if instructions_for(kind) is None}


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


def _instructions_or_why_not(weights: str) -> str:
    if weights not in WEIGHTS:
        raise KernelsUnavailable(
            f"the CPU kernels have no {weights} weights, they have {', '.join(WEIGHTS)}", WAY_OUT
        )
    switch = os.environ.get(SWITCH, "")
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
    instructions = instructions_for(weights)
    if instructions is not None:
        return instructions
    names, others = ", ".join(lacking()[weights]), ", ".join(supported_weights())
    if others:
        raise KernelsUnavailable(
            f"{weights} weights need {names}, which this CPU lacks{by_name()}",
            f"use weights that it can run ({others}), or engine 'hf'",
        )
    raise KernelsUnavailable(
        f"this CPU has no {names}, which the CPU kernels need{by_name()}", WAY_OUT
    )


def _find(instructions: str, report: Report | None) -> Kernels:
    weights = tuple(kind for kind in WEIGHTS if instructions_for(kind) == instructions)

    def why_not(path: Path) -> str | None:
        return _why_not(instructions, path)

    packaged = Path(__file__).with_name(library_name(instructions))
    if why_not(packaged) is None:
        return Kernels(_open(packaged), packaged, instructions, weights, "package")
    from stretto.kernels.first_use import compiled

    try:
        path = compiled(instructions, why_not, report)
    except CompileFailed as error:
        raise KernelsUnavailable(
            f"the CPU kernels cannot be compiled: {error}", f"{error.way_out}, or {WAY_OUT}"
        ) from error
    return Kernels(_open(path), path, instructions, weights, "cache")


def _why_not(instructions: str, path: Path) -> str | None:
    """Why a library cannot be used, None if it can. One of other sources is not even loaded."""
    try:
        if source_hash(instructions).encode() not in path.read_bytes():
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
