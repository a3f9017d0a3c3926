"""Which model, as a run's settings tell it: its name, a mark of its weights, who taught it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.eval.judges.base import judges_of

if TYPE_CHECKING:
    from stretto.lm import LM


def describe_side(lm: LM, name: str, method: str) -> dict[str, Any]:
    """A side of a run as JSON. `name`: as the model was asked for. `scored_by`: identities of the
    judges it was trained to please."""
    from stretto.models.fingerprint import fingerprint

    folder = folder_of(name)
    return {
        "model": told_name(name),
        "fingerprint": None if folder is None else fingerprint(folder),
        "dialect": lm.card.dialect,
        "method": lm.find_method(method).name,
        "scored_by": [] if folder is None else judges_of(folder),
    }


def told_name(name: str) -> str:
    """A model's name for results: of a path that leads out of the working folder the last two
    parts, since where a folder stands on one machine means nothing on another."""
    path = Path(name)
    if not path.exists() or not (path.is_absolute() or ".." in path.parts):
        return name
    return "/".join(path.resolve().parts[-2:])


def folder_of(name: str) -> Path | None:
    """The folder of a model on this disk; None if it has none."""
    from stretto.errors import StrettoError
    from stretto.models import resolve

    if Path(name).is_dir():
        return Path(name)
    try:
        return resolve(name, offline=True).path
    except StrettoError:
        return None
