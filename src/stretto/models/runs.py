"""Folders of runs, which are asked for as models although their model lies within. No torch."""

import re
from pathlib import Path

from stretto.errors import ModelUnavailable
from stretto.models.weights import is_adapter, read_json_object

MODEL = "model"
ROUND = re.compile(r"round-(\d+)")
FACTS = "environment.json"
"""What every run writes before anything else."""
ROWS = "rows.jsonl"
"""Of a run that measures, and makes no model."""


def check_no_run(folder: Path) -> None:
    """Raises `ModelUnavailable`, naming the model in it, for the folder of a run of training, or of
    one of its rounds. Anything else passes, also what is no model."""
    config = folder / "config.json"
    if is_adapter(folder) or (config.is_file() and "model_type" in read_json_object(config)):
        return
    if (found := model_in(folder)) is not None:
        raise ModelUnavailable(f"{folder} is a training run; its model is {found}")
    if (folder / FACTS).is_file() and (folder / ROWS).exists():
        raise ModelUnavailable(f"{folder} is a run of stretto eval; name the model it measured")
    if (folder / FACTS).is_file():
        raise ModelUnavailable(
            f"{folder} is a training run without a model yet; the command that began it goes on"
        )


def model_in(folder: Path) -> Path | None:
    """The model of a training run: its own, or that of the last round which has one."""
    rounds = [(int(name[1]), path) for path in folder.iterdir()
              if (name := ROUND.fullmatch(path.name))]  # fmt: skip
    places = [folder, *(path for _, path in sorted(rounds, reverse=True))]
    return next((p / MODEL for p in places if any((p / MODEL).glob("*.safetensors"))), None)
