"""Problems as rows of files: annotated responses, their graphs, and what could not be labelled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stretto.data.graphs import Graph, too_few
from stretto.data.labels import Labels, Tally
from stretto.data.registers import max_live
from stretto.data.rows import Annotated, Reject, prompt_id
from stretto.problems.base import Problem


def graph_of(problem: Problem) -> Graph:
    """The graph of a problem's plain response."""
    return Graph(
        id=f"{prompt_id(problem.prompt)}/0",
        steps=list(problem.spans),
        reads=[list(step.reads) for step in problem.steps],
        facts=[step.fact for step in problem.steps],
        annotator="problems",
        details={"problem": problem.id},
    )


def rows_of(
    problems: Iterable[Problem], labels: Labels, tally: Tally
) -> Iterator[tuple[Problem, Annotated | Reject]]:
    """A row of each problem, or the reason that it has none; a prompt that came before is left out
    and counted."""
    seen: set[str] = set()
    for problem in problems:
        name = prompt_id(problem.prompt)
        if name in seen:
            tally.num_repeated += 1
            continue
        seen.add(name)
        found = problem.labelled(labels)
        if found is None:
            needed = max_live(problem.reads, grace=labels.grace)
            reason = too_few(needed, labels)
            tally.drop(reason)
            yield problem, Reject(prompt_id=name, reasons=[reason])
            continue
        tally.add(found.details)
        yield (
            problem,
            Annotated(
                prompt_id=name,
                prompt=problem.prompt,
                response=found.response,
                annotated=found.annotated,
                annotator=f"{problem.task}-{labels.name}",
                details={"problem": problem.id, "answer": problem.answer, **found.details},
            ),
        )
