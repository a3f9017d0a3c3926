"""Dependence graphs of responses: files of them, and registers for the responses they belong to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

from pydantic import Field, NonNegativeInt, model_validator

from stretto.data.items import Item
from stretto.data.labels import CutText, Labelled, Labels, label
from stretto.data.registers import max_live
from stretto.data.rows import Annotated, Reject, Row
from stretto.dialects.registers import MAX_REGISTERS, register_tags
from stretto.errors import InvalidInput


class Graph(Row):
    """The steps of a response and what they read.

    `id`: the response's key, PROMPT_ID/SAMPLE. `steps`: where each one stands in the response, in
    code points, `[start, end)`; each begins where the one before ends, and the last ends with the
    response. Text before the first is in no step and always seen. `reads`: of each step the earlier
    ones that it needs. `facts`: of each step what a restatement would say of it, in its shortest
    form; without them nothing is restated. `annotator`, `details`: who found the graph, and how.
    """

    kind: ClassVar[str] = "graph"
    id: str = Field(min_length=1)
    steps: list[tuple[NonNegativeInt, NonNegativeInt]]
    reads: list[list[NonNegativeInt]]
    facts: list[str] | None = None
    annotator: str = ""
    details: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _a_graph_of_steps(self) -> Self:
        for name, values in (("reads", self.reads), ("facts", self.facts)):
            if values is not None and len(values) != len(self.steps):
                raise ValueError(f"{len(values)} {name} for {len(self.steps)} steps")
        for number, (start, end) in enumerate(self.steps):
            if start >= end:
                raise ValueError(f"step {number} is empty or ends before it starts")
        for number, ((_, end), (start, _)) in enumerate(itertools.pairwise(self.steps)):
            if start != end:
                raise ValueError(f"step {number} ends at {end} and the next starts at {start}")
        for number, needed in enumerate(self.reads):
            if late := [j for j in needed if j >= number]:
                raise ValueError(f"step {number} reads {late[0]}, which is not before it")
        return self

    @property
    def key(self) -> str:
        return self.id

    def cut(self, response: str, *, follow: bool = True) -> CutText:
        """The response in steps. `follow`: each step reads the one before, too. Raises
        `InvalidInput` if the steps are not those of this response."""
        if not self.steps or self.steps[-1][1] != len(response):
            end = self.steps[-1][1] if self.steps else 0
            raise InvalidInput(f"steps end at {end} and the response at {len(response)}")
        reads = tuple(
            tuple(sorted({*needed, *([k - 1] if follow and k else [])}))
            for k, needed in enumerate(self.reads)
        )
        texts = tuple(response[start:end] for start, end in self.steps)
        facts = None if self.facts is None else tuple(self.facts)
        return CutText(texts, reads, response[: self.steps[0][0]], facts)


def labelled_item(
    item: Item,
    graph: Graph | None,
    labels: Labels,
    count: Callable[[str], int],
    *,
    follow: bool = True,
    keep_prompt: bool = True,
) -> Annotated | Reject:
    """A response with registers, or why it has none. `count`: tokens of a text."""
    found = _labelled(item, graph, labels, count, follow)
    if isinstance(found, str):
        return Reject(
            prompt_id=item.prompt_id,
            sample=item.sample,
            response_id=item.response_id,
            reasons=[found],
        )
    return Annotated(
        prompt_id=item.prompt_id,
        sample=item.sample,
        prompt=item.prompt if keep_prompt else None,
        response=found.response,
        annotated=found.annotated,
        annotator=labels.name,
        details=found.details,
    )


def _labelled(
    item: Item, graph: Graph | None, labels: Labels, count: Callable[[str], int], follow: bool
) -> Labelled | str:
    if graph is None:
        return "no-graph: no graph has its key"
    if register_tags(item.response, MAX_REGISTERS)[0]:
        return "tags-in-response: it has a register in its own text"
    try:
        cut = graph.cut(item.response, follow=follow)
        found = label(cut, labels, count, item.key)
    except InvalidInput as error:
        return f"not-its-graph: {error}"
    return too_few(max_live(cut.reads, grace=labels.grace), labels) if found is None else found


def too_few(needed: int, labels: Labels) -> str:
    """Why a response has no registers: too many steps are needed at once."""
    return (
        f"too-few-registers: {needed} steps are needed at once, more than {labels.num_registers} "
        "registers hold"
    )


def keyed(graphs: Iterable[Graph]) -> dict[str, Graph]:
    """Graphs by their keys. Raises `InvalidInput` for two of one key."""
    found: dict[str, Graph] = {}
    for graph in graphs:
        if graph.key in found:
            raise InvalidInput(f"there are two graphs of {graph.key}; leave one out")
        found[graph.key] = graph
    return found
