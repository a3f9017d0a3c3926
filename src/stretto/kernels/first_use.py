"""The kernels compiled on first use, into the cache: where the package came without a library, or
where its sources have changed since."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from stretto.errors import ModelUnavailable
from stretto.kernels.recipe import CompileFailed, compile_library, compilers, source_hash
from stretto.models.cache import build_once, cache_root
from stretto.models.progress import Report, silent

NEEDED_BYTES = 32_000_000
"""Disk that compiling occupies at its peak, assembly and object file included; then under 1 MB."""


def library_path(instructions: str) -> Path:
    """Where the library lies, or would lie, that is compiled from the sources as they are."""
    return cache_root() / "kernels" / source_hash(instructions) / f"stretto_{instructions}.so"


def compiled(
    instructions: str, loads: Callable[[Path], str | None], report: Report | None = None
) -> Path:
    """The library in the cache; compiled there if it is missing or does not load.

    `loads(path)` tries to load a library and returns None, or why it cannot be. However many
    processes ask, one compiles and the others wait; a killed one leaves nothing half-made.
    Raises `CompileFailed`: there is no compiler, none succeeds, or the cache cannot be written.
    """
    path = library_path(instructions)
    report = silent if report is None else report

    def is_good() -> bool:
        return path.is_file() and loads(path) is None

    def build(folder: Path) -> None:
        report("compiling the CPU kernels, once", 0, 0)
        _compile(instructions, folder / path.name, loads, path.parent.with_suffix(".log"))
        report("compiling the CPU kernels, once", 1, 1)

    if not is_good():
        try:
            build_once(
                path.parent, build, is_good=is_good, needed_bytes=NEEDED_BYTES, report=report
            )
        except ModelUnavailable as error:  # the cache's word for a disk that is full or read-only
            reason, _, way_out = str(error).rpartition("; ")
            raise CompileFailed(reason, way_out) from error
    return path


def _compile(
    instructions: str, library: Path, loads: Callable[[Path], str | None], kept_log: Path
) -> None:
    """By the first compiler whose library loads. The log stays only if there is none."""
    log = library.with_suffix(".log")
    reasons = []
    for compiler in compilers():
        try:
            compile_library(compiler, instructions, library, log)
        except CompileFailed as error:
            reasons.append(str(error))
        else:
            reason = loads(library)
            if reason is None:
                log.unlink(missing_ok=True)
                kept_log.unlink(missing_ok=True)
                return
            reasons.append(f"the library made by {compiler[0]} cannot be loaded: {reason}")
        library.unlink(missing_ok=True)
    if not log.stat().st_size:
        raise CompileFailed(reasons[0])
    shutil.copyfile(log, kept_log)
    raise CompileFailed(f"{reasons[0]} (all of it: {kept_log})")
