"""Names of models and what they stand for: a local folder that is checked and ready to load."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stretto.errors import ModelUnavailable, UnknownName
from stretto.models import embedded, gguf_cache
from stretto.models.embedded import EMBEDDED_MODEL
from stretto.models.folder import ModelFacts, inspect_folder
from stretto.models.offline import is_offline, way_online
from stretto.models.progress import Report, shown_on_stderr
from stretto.models.runs import check_no_run
from stretto.models.shipped import shipped
from stretto.models.weights import is_adapter

Source = Literal["embedded", "folder", "gguf", "hub", "adapter"]

HUB_FILES = ["*.safetensors", "*.json", "merges.txt", "*.jinja"]  # data only: no pickles, no code
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this disk. `path` is a folder for transformers; `name` is how it was asked for."""

    name: str
    path: Path
    source: Source
    facts: ModelFacts

    @property
    def size_bytes(self) -> int:
        return self.facts.size_bytes


def resolve(
    name_or_path: str | os.PathLike[str] = EMBEDDED_MODEL,
    *,
    offline: bool | None = None,
    report: Report | None = None,
) -> ResolvedModel:
    """Return the model that `name_or_path` stands for, fetching or converting it if needed.

    Tried in this order: the name of the embedded model or of one that comes with the package, an
    existing folder, a GGUF file, a hub name `org/model`. Offline, what is not on this disk already
    is refused. Converted models are compared with the hashes in their manifest at each call. A
    folder may hold an adapter: its base is then resolved too, and `facts` are those of both
    together. A training run's folder is refused with the name of its model. Progress goes to
    `report`, by default to stderr. Raises `UnknownName`, `ModelUnavailable` or `Unsupported`.
    """
    name = os.fspath(name_or_path)
    with _reading(), _reporting(report) as reporter:
        path, source = _locate(name, is_offline(offline), reporter)
        if is_adapter(path):
            return ResolvedModel(name, path, "adapter", _inspect_adapter(path, offline, reporter))
        return ResolvedModel(name, path, source, inspect_folder(path))


def _inspect_adapter(path: Path, offline: bool | None, report: Report) -> ModelFacts:
    from stretto.models.adapters import inspect_adapter

    return inspect_adapter(path, lambda base: resolve(base, offline=offline, report=report))


def pull(
    name_or_path: str | os.PathLike[str] = EMBEDDED_MODEL,
    *,
    offline: bool | None = None,
    report: Report | None = None,
) -> ResolvedModel:
    """Like `resolve`, but a converted model whose cached files are damaged is built again."""
    name = os.fspath(name_or_path)
    with _reading(), _reporting(report) as reporter:
        if name == EMBEDDED_MODEL and not is_offline(offline):
            embedded.pull(reporter)
        elif (path := _gguf_path(name)) is not None:
            gguf_cache.converted(path, reporter, repair=True)
        return resolve(name, offline=offline, report=reporter)


def _locate(name: str, offline: bool, report: Report) -> tuple[Path, Source]:
    if name == EMBEDDED_MODEL:
        return _embedded(offline, report), "embedded"
    if (packaged := shipped().get(name)) is not None:
        return packaged, "folder"
    path = Path(os.path.expanduser(name))  # leaves an unknown ~user as it is
    if name and os.path.isdir(path):  # False, not an error, for a name too long to be a path
        check_no_run(path)
        return path.resolve(), "folder"
    if (file := _gguf_path(name)) is not None:
        return gguf_cache.converted(file, report), "gguf"
    if os.path.isfile(path):
        raise ModelUnavailable(f"{path} is neither a folder nor a .gguf file; give one of them")
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelUnavailable(f"no model at {path}; give a folder with a config.json")
    if HUB_NAME.fullmatch(name):
        return _hub(name, offline), "hub"
    raise UnknownName("model or folder", name, [EMBEDDED_MODEL, *shipped()])


def _embedded(offline: bool, report: Report) -> Path:
    if not offline and not embedded.folder().exists():
        return embedded.pull(report)
    return embedded.verified()


def _gguf_path(name: str) -> Path | None:
    """Return the GGUF file that `name` is a path of; None if it is no such path at all."""
    path = Path(os.path.expanduser(name))
    if path.suffix.lower() != ".gguf" or os.path.isdir(path):
        return None
    if not os.path.isfile(path):
        raise ModelUnavailable(f"no file {path}; check the path")
    return path.resolve()


@contextmanager
def _reading() -> Iterator[None]:
    """Name the file that could not be read; what writes has told of its own errors already."""
    try:
        yield
    except OSError as error:
        raise ModelUnavailable(
            f"cannot read {error.filename}: {error.strerror}; check its permissions"
        ) from error


@contextmanager
def _reporting(report: Report | None) -> Iterator[Report]:
    if report is not None:
        yield report
    else:
        with shown_on_stderr() as shown:
            yield shown


def _hub(name: str, offline: bool) -> Path:
    """Return the hub's local snapshot of `name`, downloading what is missing unless offline."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(_snapshot()(name, allow_patterns=HUB_FILES, local_files_only=offline))
    except LocalEntryNotFoundError as error:
        if offline:
            raise ModelUnavailable(
                f"no folder {name!r} here and no hub model of that name on this disk;"
                f" {way_online()}run `stretto model pull {name}` while online"
            ) from error
        raise _not_fetched(name, error) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _not_fetched(name, error) from error


def _snapshot() -> Callable[..., str]:
    from huggingface_hub import snapshot_download

    return snapshot_download


def _not_fetched(name: str, error: Exception) -> ModelUnavailable:
    first_line = next((line for line in str(error).splitlines() if line.strip()), "no answer")
    return ModelUnavailable(
        f"no folder {name!r} here, and the hub did not give a model of that name:"
        f" {first_line.strip()}; check the name and the network"
    )
