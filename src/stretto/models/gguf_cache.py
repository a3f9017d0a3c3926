"""GGUF files given by path, each converted once and kept under its hash."""

from pathlib import Path

from stretto.models import cache
from stretto.models.manifest import is_intact, sha256_of, verify_manifest, write_manifest
from stretto.models.progress import Report

CONVERSION = 1  # raise it when conversion changes, so that older caches are left alone
BYTES_PER_BYTE = 8  # a 2-bit file grows eightfold in bfloat16


def converted(source: Path, report: Report, *, repair: bool = False) -> Path:
    """Return the folder converted from `source`, converting it now if it is not in the cache.

    A cached folder that is damaged is rebuilt if `repair`, else refused. Raises `ModelUnavailable`
    if the file is damaged too or the disk is full, and `Unsupported` if the file holds a kind of
    model that is not run.
    """
    digest = sha256_of(source)
    final = cache.models_root() / f"gguf-{digest[:16]}-v{CONVERSION}"
    if final.exists() and not repair:
        verify_manifest(final, pull_name=str(source))
        return final

    def build(scratch: Path) -> None:
        from stretto.models.gguf import convert

        convert(source, scratch, report=report)
        write_manifest(scratch, name=source.name, source={"gguf": source.name, "sha256": digest})

    cache.build_once(
        final,
        build,
        is_good=lambda: is_intact(final),
        needed_bytes=source.stat().st_size * BYTES_PER_BYTE,
        report=report,
    )
    return final
