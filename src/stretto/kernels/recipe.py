"""How the CPU kernels are compiled, by the package's build and on first use alike.

Standard library only, and nothing of Stretto: setup.py runs this file where neither is installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-w")
"""Linked without -fopenmp: the OpenMP that torch has loaded already must be the one in use.
-w: the vector headers of some compilers warn on every line."""
INSTRUCTIONS = {
    "avx512": (
        "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni",
        "-mfma",
    ),
    "avx2": ("-mavx2", "-mfma"),
}  # fmt: skip
"""Instruction sets, of each of which there is a library, and the flags that select them."""
COMPILE_TIMEOUT_S = 600.0
CORRECT_CXX = "correct or unset CXX"


class CompileFailed(Exception):
    """There is no compiler, or none that can compile the kernels; the message is one line."""

    def __init__(self, reason: str, way_out: str = "install g++ 10 or newer") -> None:
        super().__init__(reason)
        self.way_out = way_out


def is_for(platform: str) -> bool:
    """Whether the kernels can be compiled for a platform, named as by `sysconfig`."""
    return platform == "linux-x86_64"


def library_name(instructions: str) -> str:
    """Of the library that the package's build puts beside this file."""
    return f"_{instructions}.so"


def flags_for(instructions: str) -> tuple[str, ...]:
    return (*COMPILE_FLAGS, *INSTRUCTIONS[instructions])


def source_hash(instructions: str) -> str:
    """Of the C++ sources and the flags they are compiled with."""
    digest = hashlib.sha256(" ".join(flags_for(instructions)).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compilers() -> list[list[str]]:
    """The compilers to try, each as the begin of a command: $CXX alone if set, else those found
    under their usual names. Raises `CompileFailed` if there is none."""
    own = os.environ.get("CXX", "").strip()
    if own:
        try:
            command = shlex.split(own)
        except ValueError as error:
            raise CompileFailed(f"CXX={own!r} cannot be parsed: {error}", CORRECT_CXX) from error
        if shutil.which(command[0]) is None:
            raise CompileFailed(f"CXX={own!r} is not found", CORRECT_CXX)
        return [command]
    found: dict[str, str] = {}  # c++ is often another name of g++
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            found.setdefault(os.path.realpath(path), name)
    if not found:
        raise CompileFailed("there is no C++ compiler (c++, g++ or clang++)")
    return [[name] for name in found.values()]


def compile_library(
    compiler: list[str],
    instructions: str,
    library: Path,
    log: Path,
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> None:
    """Compiles the kernels to `library`; intermediate files lie in its folder and are removed.

    What the compiler says is in `log`. Raises `CompileFailed` with the gist of it.
    """
    object_file = library.with_suffix(".o")
    name = shlex.join(compiler)
    defines = (
        f'-DSTRETTO_SOURCE="{source_hash(instructions)}"',
        f'-DSTRETTO_VECTORS="{instructions}.h"',
    )
    compile_it = [*compiler, *flags_for(instructions), *defines]
    source = str(SOURCES / "api.cpp")
    try:
        for command in (
            [*compile_it, "-c", source, "-o", str(object_file)],
            [*compiler, "-shared", str(object_file), "-o", str(library)],
        ):
            try:
                status = _run(command, log, library.parent, timeout_s)
            except subprocess.TimeoutExpired:
                raise CompileFailed(f"{name} took more than {timeout_s:g} s") from None
            except OSError as error:
                raise CompileFailed(f"{name} cannot be run: {error.strerror}") from error
            if status != 0:
                raise CompileFailed(f"{name} failed: {_gist(log, status)}")
        if not library.is_file():
            raise CompileFailed(f"{name} ended well but made no library")
    finally:
        object_file.unlink(missing_ok=True)


def _run(command: list[str], log: Path, scratch: Path, timeout_s: float) -> int:
    """Exit status of `command`. On a timeout or an interrupt all that it started is ended."""
    environment = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _gist(log: Path, status: int) -> str:
    """The first error that a compiler told, else its last line."""
    lines = [line for line in _lines(log) if line]
    errors = [line for line in lines if "error:" in line]
    gist = (errors or lines[-1:] or [f"exit status {status}, and not a word"])[0]
    return gist if len(gist) <= 200 else f"{gist[:199]}…"


def _lines(log: Path) -> Iterator[str]:
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        yield " ".join(line.split())
