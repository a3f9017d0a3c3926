"""What lies in the model cache."""

from dataclasses import dataclass
from pathlib import Path

from stretto.errors import ModelUnavailable
from stretto.models.cache import models_root
from stretto.models.manifest import read_manifest, verify_manifest


@dataclass(frozen=True)
class CachedModel:
    """A folder of the cache. `problem` says what is wrong with it, None if sizes agree."""

    name: str
    path: Path
    size_bytes: int
    problem: str | None


def cached_models() -> list[CachedModel]:
    """Return the converted models in the cache by folder name; scratch folders are left out.

    Raises `ModelUnavailable` for a cache that cannot be read.
    """
    root = models_root()
    try:
        found = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."]
        return [_described(folder) for folder in sorted(found)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ModelUnavailable(
            f"cannot read {error.filename}: {error.strerror}; point STRETTO_CACHE to another folder"
        ) from None


def _described(folder: Path) -> CachedModel:
    size_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        name = str(read_manifest(folder, remedy="remove the folder").get("name", folder.name))
        verify_manifest(folder, pull_name=name, hashes=False)
    except ModelUnavailable as error:
        return CachedModel(folder.name, folder, size_bytes, str(error))
    return CachedModel(name, folder, size_bytes, None)
