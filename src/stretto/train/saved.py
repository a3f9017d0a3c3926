"""Whether a run has saved its model already: whole, not at all, or so that somebody must look."""

from __future__ import annotations

from pathlib import Path

from stretto.errors import InvalidInput, ModelUnavailable
from stretto.models.adapters import BASE
from stretto.models.weights import is_adapter, read_header, weight_files
from stretto.tokens.card import CARD


def is_saved(folder: Path) -> bool:
    """Whether `Trainee.save` has written this folder; not if it is missing or empty. Raises
    `InvalidInput` for one that holds something else than all of a model."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        for path in weight_files(folder):
            read_header(path)
    except (OSError, ModelUnavailable) as error:
        raise _partly(folder, str(error)) from None
    others = (BASE,) if is_adapter(folder) else ("config.json", "tokenizer.json")
    for name in (CARD, *others):
        if not (folder / name).is_file():
            raise _partly(folder, f"it has no {name}")
    return True


def _partly(folder: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{folder} is not a whole model ({reason}); remove it and run the same command again"
    )
