"""Problems that rollouts are scored on: prompts, and a task's score of an answer's text.

Every task of `stretto eval` that scores answers will do; `exact` and `boxed` are for any file of
prompts with reference answers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
    lacks_reference,
    load_prompts,
)
from stretto.problems import TASKS as GENERATED
from stretto.problems import TRAIN_SIZES, parse_sizes, problems
from stretto.problems.draw import VERSION

MADE = 1024
"""Problems that are made where no number is given."""


@dataclass(frozen=True)
class Problems:
    """Problems in order, each once. `score` of a problem and an answer's text is from 0 to 1."""

    items: tuple[Item, ...]
    score: Callable[[Item, str], Score]
    digest: str
    left_out: dict[str, int]


def load_problems(name: str, source: Source, sizes: str | None = None) -> Problems:
    """The problems of a task: `exact`, `boxed`, one of `stretto eval`, or of `stretto.problems`.

    Of the last there may be several with commas; `source.limit` problems are made of `source.split`
    and `sizes` (SIZE or LOW-HIGH), in turn of each. Raises `UnknownName`, and `InvalidInput` for a
    task whose answers only a judge can weigh and where nothing is left.
    """
    made = name.split(",")
    if set(made) <= set(GENERATED):
        task = Task(name, VERSION, lambda own: _make(made, own, sizes), _check)
    else:
        task = _task(name)
        if sizes is not None:
            raise InvalidInput(f"task {name} has no sizes; they are for {', '.join(GENERATED)}")
    if task.score is None:
        raise InvalidInput(f"task {name} has no score to learn from; take one that checks answers")
    prompts = load_prompts(task, source)
    return Problems(prompts.items, task.score, prompts.digest, prompts.left_out)


def _task(name: str) -> Task:
    if name == EXACT.name:
        return EXACT
    if name not in TASKS:
        raise UnknownName("task", name, [EXACT.name, *TASKS])
    return get_task(name)


# -- problems that are made ------------------------------------------------------------------------


def _make(names: Sequence[str], source: Source, sizes: str | None) -> Loaded:
    if source.paths:
        raise InvalidInput(f"task {names[0]} makes its own problems; leave the files out")
    between = TRAIN_SIZES if sizes is None else parse_sizes(sizes)
    split = source.split or "train"
    want = MADE if source.limit is None else source.limit
    each = -(-want // len(names))
    columns = [problems(name, between, each, split=split, seed=source.seed) for name in names]
    rows = [problem for row in zip(*columns, strict=True) for problem in row][:want]
    return Loaded([Item(problem.prompt, problem) for problem in rows])


def _check(item: Item, text: str) -> Score:
    return Score(float(item.gold.check(text)))


# -- any file with reference answers ---------------------------------------------------------------


def _load(source: Source) -> Loaded:
    return from_files("exact", source, partial(_item, source))


def _item(source: Source, prompt: str, reference: str | None, place: str) -> Item:
    if reference is None or not reference.strip():
        raise lacks_reference(source, place)
    return Item(prompt, reference)


def exact(item: Item, text: str) -> Score:
    """1 if the answer is the reference, as judge `exact` compares: the last number of the answer,
    or its whole text."""
    check = ExpectedAnswers({item.prompt_id: item.gold})
    return Score(check(item.prompt, text))


EXACT = Task("exact", 1, _load, exact)
