"""The model cache: folders that are either complete under their final name or not there at all.

A folder is built in a hidden sibling, flushed to disk and renamed. The builder holds a file lock
that the system drops when its process dies, so a leftover sibling seen by the holder of the lock
belongs to nobody and is removed.
"""

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.errors import ModelUnavailable
from stretto.models.progress import Report

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def cache_root() -> Path:
    """Return the cache folder: $STRETTO_CACHE, else `stretto` in the platform's user cache."""
    own = os.environ.get("STRETTO_CACHE")
    if own:
        return Path(os.path.expanduser(own))  # leaves an unknown ~user as it is
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / ".cache") / "stretto"


def models_root() -> Path:
    """Return the folder in which converted models lie, one folder each."""
    return cache_root() / "models"


def build_once(
    final: Path,
    build: Callable[[Path], None],
    *,
    is_good: Callable[[], bool],
    needed_bytes: int,
    report: Report,
) -> None:
    """Make sure that `final` exists, building it at most once however many processes ask.

    `build(folder)` fills an empty folder; what it leaves there is flushed and renamed to `final`.
    A `final` that exists but is not `is_good()` is replaced. `needed_bytes` is what `build` may
    occupy at its peak. Raises `ModelUnavailable` if the disk is full or not writable; nothing is
    left under `final` then, nor when the process is killed.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final, report):
            if is_good():
                return
            _remove_leftovers(final)
            _require_space(final, needed_bytes)
            scratch = final.parent / f"{_scratch_prefix(final)}{os.getpid()}-{secrets.token_hex(4)}"
            try:
                scratch.mkdir()
                build(scratch)
                _flush(scratch)
                _replace(scratch, final)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except Exception as error:
        if not _is_disk_error(error):
            raise
        raise _disk_error(final, error, needed_bytes) from error


@contextmanager
def _locked(final: Path, report: Report) -> Iterator[None]:
    """Hold the build lock of `final`; say so if another process has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(final.parent / f".{final.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another process to build {final.name}", 0, 0)
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


def _scratch_prefix(final: Path) -> str:
    return f".{final.name}.tmp-"


def _remove_leftovers(final: Path) -> None:
    """Remove what killed builders left. The caller holds the lock, so no living one is hit."""
    for leftover in final.parent.glob(f"{_scratch_prefix(final)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _require_space(final: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(final.parent).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(final.parent))


def _replace(scratch: Path, final: Path) -> None:
    """Rename `scratch` to `final`; an unusable `final` is moved out of the way first."""
    if final.exists():
        old = final.parent / f"{_scratch_prefix(final)}old-{secrets.token_hex(4)}"
        final.rename(old)
        scratch.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        scratch.rename(final)
    _flush_folder(final.parent)


def _flush(folder: Path) -> None:
    """Write the contents of `folder` through to the disk, so that the rename cannot precede it."""
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    if sys.platform == "win32":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_disk_full(error: Exception) -> bool:
    return _errno(error) in DISK_FULL


def _is_disk_error(error: Exception) -> bool:
    return isinstance(error, OSError) or _errno(error) is not None


def _errno(error: Exception) -> int | None:
    """The system's number; safetensors and tokenizers have it in the text of their errors."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _disk_error(final: Path, error: Exception, needed_bytes: int) -> ModelUnavailable:
    if _is_disk_full(error):
        return ModelUnavailable(
            f"no space left for {final}: building it takes {needed_bytes:,} bytes;"
            " free some, or point STRETTO_CACHE to another disk"
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ModelUnavailable(
        f"cannot write {final}: {reason}; point STRETTO_CACHE to a folder that you can write"
    )
