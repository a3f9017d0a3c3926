"""The prompts' texts of a run that has kept only their ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.data.rows import prompt_id
from stretto.errors import InvalidInput
from stretto.eval.folder import Run
from stretto.eval.tasks import Item, Source, get_task, load_prompts


def source_of(run: Run, paths: Sequence[Path] = ()) -> Source:
    """Where the run's prompts came from, but for the files, which are given."""
    task = run.config["task"]
    return Source(
        paths=tuple(paths),
        prompt_field=task["prompt_field"],
        reference_field=task["reference_field"],
        limit=task["limit"],
        seed=run.config["sampling"]["seed"],
        split=task["split"],
        skip_if=tuple(task["skip_if"]),
        size=task["size"],
    )


def items_of(run: Run, paths: Sequence[Path] = ()) -> dict[str, Item]:
    """The task's items by prompt id, read or made anew. Raises `InvalidInput` if they are not those
    of the run: other files, or another version of the task."""
    settings = run.config["task"]
    task = get_task(settings["name"])
    if task.version != settings["version"]:
        raise InvalidInput(
            f"{run.path} is of version {settings['version']} of task {task.name}, this is "
            f"{task.version}; run it again"
        )
    prompts = load_prompts(task, source_of(run, paths))
    if prompts.digest != settings["digest"]:
        raise InvalidInput(f"these are not the prompts of {run.path}; name its files (--prompts)")
    return {item.prompt_id: item for item in prompts.items}


def texts_of(run: Run, paths: Sequence[Path] = ()) -> dict[str, str]:
    """The text of every prompt by its id: the run's own where it has kept them, else as
    `items_of`. Raises `InvalidInput`."""
    kept = {row.prompt_id: row.prompt for row in run.rows if row.prompt is not None}
    for name, text in kept.items():
        if prompt_id(text) != name:
            raise InvalidInput(f"prompt {name} of {run.path} has another text than it had")
    if len(kept) == len({row.prompt_id for row in run.rows}):
        return kept
    return {name: item.prompt for name, item in items_of(run, paths).items()}
