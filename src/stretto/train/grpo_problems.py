"""Problems that rollouts are scored on: prompts, and a task's score of an answer's text.

Every task of `stretto eval` that scores answers will do; `exact` and `boxed` are for any file of
prompts with reference answers. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from stretto.errors import InvalidInput, UnknownName
from stretto.eval.judges.exact import ExpectedAnswers
from stretto.eval.tasks import (
    TASKS,
    Item,
    Loaded,
    Score,
    Source,
    Task,
    from_files,
    get_task,
    load_prompts,
)


@dataclass(frozen=True)
class Problems:
    """Problems in order, each once. `score` of a problem and an answer's text is from 0 to 1."""

    items: tuple[Item, ...]
    score: Callable[[Item, str], Score]
    digest: str
    left_out: dict[str, int]


def load_problems(name: str, source: Source) -> Problems:
    """The problems of a task. Raises `UnknownName`, and `InvalidInput` for a task whose answers
    only a judge can weigh and where nothing is left."""
    task = reward_task(name)
    if task.score is None:
        raise InvalidInput(f"task {name} has no score to learn from; take one that checks answers")
    prompts = load_prompts(task, source)
    return Problems(prompts.items, task.score, prompts.digest, prompts.left_out)


def reward_task(name: str) -> Task:
    """The task called `name`: `exact`, `boxed`, or one of `stretto eval`."""
    own = {task.name: task for task in (EXACT, BOXED)}
    if name in own:
        return own[name]
    if name not in TASKS:
        raise UnknownName("task", name, [*own, *TASKS])
    return get_task(name)


# -- any file with reference answers ---------------------------------------------------------------


def _load(name: str, source: Source) -> Loaded:
    return from_files(name, source, lambda *line: _item(source, *line))


def _item(source: Source, prompt: str, reference: str | None, place: str) -> Item:
    if reference is None or not reference.strip():
        field = source.reference_field or "response or answer"
        raise InvalidInput(
            f"{place} has no text in field {field}, the reference answer; name the field that has "
            "with --reference-field"
        )
    return Item(prompt, reference)


def exact(item: Item, text: str) -> Score:
    """1 if the answer is the reference, as judge `exact` compares: the last number of the answer,
    or its whole text."""
    check = ExpectedAnswers({item.prompt_id: item.gold})
    return Score(check(item.prompt, text))


def boxed(item: Item, text: str) -> Score:
    r"""1 if what the answer's last `\boxed{...}` holds is the reference: the same integer, or else
    the same text but for white space."""
    found = last_boxed(text)
    wanted = last_boxed(item.gold)
    same = found is not None and _plain(found) == _plain(item.gold if wanted is None else wanted)
    return Score(float(same), details={"found": found})


def last_boxed(text: str) -> str | None:
    r"""What the last whole `\boxed{...}` of a text holds, braces inside it balanced."""
    for start in reversed([found.end() for found in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at]
    return None


def _plain(text: str) -> str:
    bare = re.sub(r"\s|\$|\\[,;!]", "", text)
    number = re.fullmatch(r"([+-]?)0*(\d+(?:,\d{3})*|\d+)(?:\.0*)?", bare)
    if number is None:
        return bare
    value = int(number[2].replace(",", ""))
    return str(-value if number[1] == "-" else value)


EXACT = Task("exact", 1, lambda source: _load("exact", source), exact)
BOXED = Task("boxed", 1, lambda source: _load("boxed", source), boxed)
