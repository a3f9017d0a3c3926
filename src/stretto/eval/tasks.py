"""Tasks: prompts, and how an answer to one is scored. One small file each; `get_task` finds one.

A task has a version, which is raised when its prompts or scores change: runs of two versions are
never compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.data.rows import prompt_id
from stretto.errors import InvalidInput, UnknownName

TASKS = (
    "instruct", "gsm8k", "math", "boxed", "multipart", "program", "tree", "chain", "dag",
    "countdown",
)  # fmt: skip


@dataclass(frozen=True)
class Score:
    """How right an answer is, from 0 to 1. `shares`: further figures from 0 to 1, whose means over
    prompts are told. `details`: what was read in the answer, any JSON. `vote`: what it says in a
    normal form, so that answers which say the same have the same; None if it says nothing."""

    value: float
    shares: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    vote: str | None = None


@dataclass(frozen=True)
class Item:
    """A prompt of a task. `gold`: what its scorer needs, any kind of value; None if nothing."""

    prompt: str
    gold: Any = None

    @property
    def prompt_id(self) -> str:
        return prompt_id(self.prompt)


@dataclass(frozen=True)
class Source:
    """Where a task takes its prompts from: users' JSONL files, or a seed.

    `split`: of files a range of percents of the prompts' hashes, of problems that are made a name;
    empty: the task's own choice, which is all of a file. `size`: of made problems of many sizes.
    `skip_if`, `limit`: as in `stretto.data.select`.
    """

    paths: tuple[Path, ...] = ()
    prompt_field: str | None = None
    reference_field: str | None = None
    limit: int | None = None
    seed: int = 0
    split: str = ""
    skip_if: tuple[str, ...] = ()
    size: str = ""


@dataclass(frozen=True)
class Loaded:
    """Items in order, repeated prompts included, and how many lines were left out for which
    reason."""

    items: list[Item]
    left_out: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """`load` gives the items of a source. `score` is None for a task whose answers only a judge can
    weigh. `has_votes`: its scores say what an answer says, so that a majority can be taken."""

    name: str
    version: int
    load: Callable[[Source], Loaded]
    score: Callable[[Item, str], Score] | None = None
    has_votes: bool = False


@dataclass(frozen=True)
class Prompts:
    """A task's prompts, each once, in order. `left_out`: lines by the reason that they are not in
    it, repetitions included."""

    items: tuple[Item, ...]
    left_out: dict[str, int]

    @property
    def digest(self) -> str:
        """SHA-256 of the ids in order: two runs with the same digest had the same prompts."""
        return hashlib.sha256("\n".join(i.prompt_id for i in self.items).encode()).hexdigest()


def get_task(name: str) -> Task:
    """Raises `UnknownName`."""
    from stretto.eval.task_boxed import BOXED, MATH
    from stretto.eval.task_gsm8k import GSM8K
    from stretto.eval.task_instruct import INSTRUCT
    from stretto.eval.task_multipart import MULTIPART
    from stretto.eval.task_problems import PROBLEM_TASKS

    known = {task.name: task for task in (INSTRUCT, GSM8K, MATH, BOXED, MULTIPART, *PROBLEM_TASKS)}
    if name not in known:
        raise UnknownName("task", name, list(known))
    return known[name]


def load_prompts(task: Task, source: Source) -> Prompts:
    """The prompts of a task. Raises `InvalidInput` where there are none, or none can be read."""
    loaded = task.load(source)
    unique: dict[str, Item] = {}
    for item in loaded.items:
        unique.setdefault(item.prompt_id, item)
    left_out = dict(loaded.left_out)
    if len(unique) < len(loaded.items):
        left_out["repetition"] = len(loaded.items) - len(unique)
    if not unique:
        counts = ", ".join(f"{reason} {n}" for reason, n in left_out.items())
        raise InvalidInput(f"no prompt is left ({counts or 'the files are empty'}); choose others")
    return Prompts(tuple(unique.values()), left_out)


def lacks_reference(source: Source, place: str) -> InvalidInput:
    """The error for a line whose reference answer is missing, or cannot be used."""
    field = source.reference_field or "response or answer"
    return InvalidInput(
        f"{place} has no text in field {field}, the reference answer; name the field that has with "
        "--reference-field"
    )


def from_files(task: str, source: Source, make: Callable[[str, str | None, str], Item]) -> Loaded:
    """Items of a user's JSONL files: `make(prompt, reference, place)` of each line selected."""
    from stretto.data.rows import read_sources
    from stretto.data.select import Selection, Split, select

    if not source.paths:
        raise InvalidInput(f"task {task} needs prompts; name a JSONL file with --prompts")
    if source.size:
        raise InvalidInput(f"task {task} has no sizes; leave out --size {source.size}")
    split = Split.parse(source.split) if source.split else Split()
    found = read_sources(
        source.paths,
        prompt_field=source.prompt_field,
        response_field=source.reference_field,
        keep_fields=source.skip_if,
    )
    kept, left_out = select(found, Selection(split, source.skip_if, source.limit))
    return Loaded([make(s.prompt, s.response, s.name) for s in kept], left_out)
