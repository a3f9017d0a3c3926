"""Task `multipart`: K questions and the sum of their results; see `stretto.eval.multipart`.

An answer is right iff the total it states is the right one. Two shares tell two faults apart:
`parts_right`, the share of parts with the right result, and `sums_own_results`, whether the total
is the sum of the results that the answer itself states. Threads that nobody reads leave the first
as it is and ruin the second.
"""

from __future__ import annotations

from stretto.errors import InvalidInput
from stretto.eval.multipart import VERSION, Problem, problems, read_answer
from stretto.eval.tasks import Item, Loaded, Score, Source, Task

NUM_PROBLEMS = 100
"""Without a limit: enough for an interval of some ten points."""


def _load(source: Source) -> Loaded:
    if source.paths or source.skip_if:
        raise InvalidInput("task multipart makes its own prompts; leave out --prompts, --skip-if")
    if source.size:
        raise InvalidInput(f"task multipart has no sizes; leave out --size {source.size}")
    count = NUM_PROBLEMS if source.limit is None else source.limit
    found = problems(source.seed, count, source.split or "test")
    return Loaded([Item(problem.prompt, problem) for problem in found])


def score(item: Item, text: str) -> Score:
    """1 if the stated total is the sum of the right results, else 0."""
    problem: Problem = item.gold
    said = read_answer(text)
    results = [said.results.get(number) for number in range(1, len(problem.parts) + 1)]
    right = [r == part.result for r, part in zip(results, problem.parts, strict=True)]
    whole = [r for r in results if r is not None]
    return Score(
        float(said.total == problem.total),
        shares={
            "parts_right": sum(right) / len(right),
            "sums_own_results": float(len(whole) == len(results) and sum(whole) == said.total),
        },
        details={"total": said.total, "results": results},
        vote=None if said.total is None else str(said.total),
    )


MULTIPART = Task("multipart", VERSION, _load, score, has_votes=True)
