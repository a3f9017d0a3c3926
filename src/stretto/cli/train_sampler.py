"""Which model sampled answers: as the settings beside them say, held to what is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import InvalidInput, StrettoError
from stretto.files import beside, parse_json

if TYPE_CHECKING:
    from stretto.data.rows import Answer
    from stretto.tokens.card import ModelCard


@dataclass(frozen=True)
class Sampler:
    """The model that sampled the answers in `file`, as `data sample` wrote it down: what it was
    called then, and its fingerprint."""

    file: Path
    name: str
    fingerprint: str


def folder_of(model: str) -> Path:
    """The folder of a model, an adapter's own. A training run's is refused."""
    from stretto.models import resolve
    from stretto.models.runs import check_no_run

    folder = Path(model).expanduser()
    if not folder.is_dir():
        return resolve(model).path
    check_no_run(folder)
    return folder


def card_of(model: str) -> ModelCard:
    """A model's card; nothing else of it is loaded."""
    from stretto.tokens.card import ModelCard

    return ModelCard.load(folder_of(model))


def control_of(
    answers: Sequence[Answer], files: Sequence[Path], model: str | None
) -> dict[str, int]:
    """Control ids of the model that sampled `answers`, which are in `files`: of `model`, or where
    it is None of the one that is named beside the files.

    Raises `InvalidInput` if it is not the model that sampled: by its fingerprint, or, where none
    was written down, by answers with control tokens of which it has none.
    """
    name = sampler_of(files, model)
    control = {} if name is None else card_of(name).control
    if any(_sampler(file) is None for file in files):
        _check_known(answers, control, files[0], name)
    return control


def sampler_of(files: Sequence[Path], model: str | None) -> str | None:
    """The name of the model that sampled the answers in `files`; None if nobody says. Raises
    `InvalidInput` if one of them was sampled by another model."""
    samplers = [found for file in files if (found := _sampler(file)) is not None]
    if model is None and samplers:
        model = samplers[0].name
        _check_here(samplers[0])
    for sampler in samplers:
        _check_same(sampler, model or sampler.name)
    return model


def _sampler(file: Path) -> Sampler | None:
    """As the settings beside a file of answers have it; None without any, or of another kind."""
    path = beside(file, "run.json")
    try:
        content = parse_json(path.read_bytes())
        name, found = content["notes"]["model"], content["settings"]["model"]
    except (FileNotFoundError, KeyError, TypeError):
        return None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is unreadable: {error}; remove it or put it back") from None
    return Sampler(file, str(name), str(found))


def _check_here(sampler: Sampler) -> None:
    """Never asks the hub: a folder's name of then may be anybody's there."""
    from stretto.models import resolve

    try:
        if not Path(sampler.name).expanduser().is_dir():
            resolve(sampler.name, offline=True)
    except StrettoError:
        raise InvalidInput(
            f"{sampler.file} was sampled by {sampler.name!r}, which is not here; name where it is "
            "(--model)"
        ) from None


def _check_same(sampler: Sampler, model: str) -> None:
    from stretto.models.fingerprint import fingerprint

    if (found := fingerprint(folder_of(model))) != sampler.fingerprint:
        raise InvalidInput(
            f"{sampler.file} was sampled by {sampler.name!r} of fingerprint {sampler.fingerprint}, "
            f"and {model} has {found}; name the model that sampled (--model)"
        )


def _check_known(
    answers: Sequence[Answer], control: dict[str, int], file: Path, name: str | None
) -> None:
    ids = set(control.values())
    foreign = sum(a.control_tokens > 0 and ids.isdisjoint(a.ids) for a in answers)
    if foreign and name is None:
        raise InvalidInput(
            f"{foreign} answers have control tokens, and no {beside(file, 'run.json').name} says "
            "which model sampled them; name it (--model)"
        )
    if foreign:
        raise InvalidInput(
            f"{foreign} answers have control tokens that {name} has not; name the model that "
            "sampled them (--model)"
        )
