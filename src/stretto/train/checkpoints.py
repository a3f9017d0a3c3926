"""Checkpoints: folders that are there whole or not at all, and hold tensors and JSON, no pickle."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto.errors import InvalidInput, StrettoError
from stretto.files import parse_json

NAME = re.compile(r"step-(\d{8})")
TENSORS, FACTS = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` steps. `facts`: whatever else is needed to go on, as JSON."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of a run, in a folder of their own; the last `keep` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint, then removes those that are too old. A kill at any moment leaves
        whole ones alone. Raises `StrettoError` where the disk takes no more."""
        final = self.folder / f"step-{checkpoint.step:08d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch = self._scratch(final)
            scratch.mkdir()
            _write(checkpoint, scratch)
            if final.exists():  # renamed first: a kill must not leave half of it
                final.rename(self._scratch(final))
            scratch.rename(final)
        except OSError as error:
            raise StrettoError(
                f"cannot write checkpoint {final}: {error.strerror or error}; make room there and "
                "run the same command again"
            ) from None
        finally:
            self._tidy()
        return final

    def latest(self) -> Checkpoint | None:
        """The last checkpoint, None if there is none. Raises `InvalidInput` for a damaged one."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folders = self._all()
        if not folders:
            return None
        folder = folders[-1]
        try:
            facts = parse_json((folder / FACTS).read_bytes())
            return Checkpoint(int(facts["step"]), load_file(folder / TENSORS), facts)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InvalidInput(
                f"checkpoint {folder} is damaged ({error}); remove it to go on from the one before"
            ) from None

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if NAME.fullmatch(p.name) and p.is_dir())

    def _scratch(self, final: Path) -> Path:
        return self.folder / f".{final.name}.{secrets.token_hex(4)}.tmp"

    def _tidy(self) -> None:
        if not self.folder.is_dir():
            return
        leftovers = [p for p in self.folder.iterdir() if p.name.endswith(".tmp")]
        for folder in [*self._all()[: -self._keep], *leftovers]:
            shutil.rmtree(folder, ignore_errors=True)


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()}
    try:
        save_file(tensors, folder / TENSORS)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    facts = {"step": checkpoint.step, **checkpoint.facts}
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for name in (TENSORS, FACTS):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
