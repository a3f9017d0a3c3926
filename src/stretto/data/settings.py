"""What an output was made with: kept beside it, so that a resumed run cannot mix two ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.errors import InvalidInput
from stretto.files import parse_json, write_atomically


def hold_to(
    path: Path,
    settings: dict[str, Any],
    what: str,
    notes: dict[str, Any] | None = None,
    *,
    has_rows: bool = False,
) -> None:
    """Writes `settings`, plain JSON values, to `path`, or checks that they are those in it.

    `notes` are written beside them, for people, and never checked. Raises `InvalidInput`, naming
    the first setting that differs, if `what` was begun otherwise, and if it `has_rows` and no such
    file: nobody knows how it was begun then.
    """
    wanted = json.loads(json.dumps(settings))
    try:
        known = parse_json(path.read_bytes())
    except FileNotFoundError:
        if has_rows:
            raise InvalidInput(
                f"{what} has rows and no {path.name}, which says how they were made; put it back "
                "or name another"
            ) from None
        content = {"settings": wanted, "notes": notes or {}}
        _write(path, (json.dumps(content, indent=2) + "\n").encode())
        return
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is unreadable: {error}; remove it or name another") from None
    known = known.get("settings") if isinstance(known, dict) else None
    if not isinstance(known, dict):
        raise InvalidInput(f"{path} holds no settings; remove it or name another")
    for name in dict.fromkeys((*wanted, *known)):
        if wanted.get(name) != known.get(name):
            raise InvalidInput(
                f"{what} was begun with {name} {_shown(known.get(name))}, not "
                f"{_shown(wanted.get(name))}; name another or use the same setting"
            )


def hold_folder_to(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """As `hold_to` of the file `name` in a folder that is a run's alone: raises `InvalidInput` too
    if the folder holds something and no such file, since it is of something else then."""
    held = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    if name not in held and (others := [n for n in held if not n.startswith(".")]):
        raise InvalidInput(
            f"{folder} holds {others[0]!r} and no run ({name}); name a folder that is new or empty"
        )
    hold_to(folder / name, settings, str(folder))


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be written: {error.strerror}; name another folder"
        ) from None


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
