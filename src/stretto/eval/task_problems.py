"""Tasks `program`, `tree`, `chain`, `dag`, `countdown`: made problems, see `stretto.problems`.

An answer is right iff it ends with a right answer, however it got there. Two shares say more:
`trace_right`, whether every step is the solution's, and `steps_right`, the share of the steps
before the first that is not. Splits are train, valid and test (the default); `size` is the number
of steps, or LOW-HIGH.
"""

from __future__ import annotations

from stretto.errors import InvalidInput
from stretto.eval.tasks import Item, Loaded, Score, Source, Task
from stretto.problems import TASKS, TRAIN_SIZES, Problem, parse_sizes, problems
from stretto.problems.draw import VERSION

NUM_PROBLEMS = 100
"""Without a limit."""


def problem_task(name: str) -> Task:
    """The task of problems of a kind, one of `stretto.problems.TASKS`."""
    return Task(name, VERSION, lambda source: _load(name, source), score)


def _load(name: str, source: Source) -> Loaded:
    if source.paths or source.skip_if:
        raise InvalidInput(f"task {name} makes its own prompts; leave out --prompts, --skip-if")
    count = NUM_PROBLEMS if source.limit is None else source.limit
    sizes = parse_sizes(source.size) if source.size else TRAIN_SIZES
    split = source.split or "test"
    found = problems(name, sizes, count, split=split, seed=source.seed)
    return Loaded([Item(problem.prompt, problem) for problem in found])


def score(item: Item, text: str) -> Score:
    """1 if the text ends with a right answer, else 0. `details`: the first step that is wrong."""
    problem: Problem = item.gold
    first = problem.first_wrong(text)
    num_right = len(problem.steps) if first is None else min(first, len(problem.steps))
    return Score(
        float(problem.check(text)),
        shares={
            "trace_right": float(first is None),
            "steps_right": num_right / len(problem.steps),
        },
        details={"first_wrong": first, "size": problem.size},
    )


PROBLEM_TASKS = tuple(problem_task(name) for name in TASKS)
