"""Graphs of many responses into a file: what is there is not found again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.data.annotators import Exhausted, Refusal, Unanswered
from stretto.data.graph_steps import Span, missing_edges, steps_of
from stretto.data.graphs import Graph
from stretto.data.items import Item
from stretto.data.rows import Reject
from stretto.data.store import Store
from stretto.errors import InvalidInput


class Finder(Protocol):
    """Finds what the steps of one response read. `find` is called from `concurrency` threads, and
    raises `Unanswered` for a response that a later run may ask of again, `Exhausted` if it can do
    no more in this run. After `stop` it gives up what it waits for."""

    @property
    def name(self) -> str: ...
    @property
    def concurrency(self) -> int: ...
    def find(self, item: Item, spans: Sequence[Span]) -> Graph | Refusal: ...
    def stop(self) -> None: ...


@dataclass
class Found:
    """What a run came to. `edges` by kind, over all graphs of the file; `missing`: of responses
    whose graph is known, the edges that it has and the one found lacks, and how many it has."""

    graphs: int = 0
    rejected: int = 0
    left: int = 0
    steps: int = 0
    edges: dict[str, int] | None = None
    known: int = 0
    known_edges: int = 0
    missing: int = 0
    stopped: str | None = None

    def add(self, graph: Graph, known: Graph | None) -> None:
        self.graphs += 1
        self.steps += len(graph.steps)
        edges = self.edges = self.edges or {}
        for name, count in graph.details.get("edges", {}).items():
            edges[name] = edges.get(name, 0) + count
        if known is not None and known.steps == graph.steps:
            self.known += 1
            self.known_edges += sum(map(len, known.reads))
            self.missing += len(missing_edges(graph, known))

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"graphs": self.graphs, "steps": self.steps}
        shown |= {"edges": self.edges or {}, "rejected": self.rejected, "left": self.left}
        if self.known:
            known = {"graphs": self.known, "edges": self.known_edges, "missing": self.missing}
            shown["known"] = known
        return shown if self.stopped is None else shown | {"stopped": self.stopped}


def find_graphs(
    items: Sequence[Item], finder: Finder, graphs: Store[Graph], rejects: Store[Reject], *,
    cut: str, known: Mapping[str, Graph],
    report: Callable[[int, int], None] = lambda done, todo: None,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Found:  # fmt: skip
    """Finds the graphs of responses that have none yet, and keeps each when it is found. `known`:
    graphs by key, whose steps are taken instead of `cut`."""
    todo = [i for i in items if i.key not in graphs and i.key not in rejects]
    found = Found()
    spans = {i.key: _spans(i, cut, known.get(i.key)) for i in todo}
    results = _results(todo, spans, finder, found, is_interrupted)
    for done, (item, result) in enumerate(results, 1):
        report(done, len(todo))
        if isinstance(result, Graph):
            graphs.add(result)
        else:
            reject = Reject(
                prompt_id=item.prompt_id,
                sample=item.sample,
                response_id=item.response_id,
                reasons=result.reasons,
            )
            rejects.add(reject)
    found.left = sum(i.key not in graphs and i.key not in rejects for i in items)
    found.rejected = sum(i.key in rejects for i in items)
    for item in items:
        if item.key in graphs:
            found.add(graphs.rows[item.key], known.get(item.key))
    return found


def _results(
    items: Sequence[Item], spans: Mapping[str, list[Span]], finder: Finder, found: Found,
    is_interrupted: Callable[[], bool],
) -> Iterator[tuple[Item, Graph | Refusal]]:  # fmt: skip
    """Results as they come. What is under way when the run ends early is still waited for."""
    waiting = iter(items)
    running: dict[Future[Graph | Refusal], Item] = {}
    with ThreadPoolExecutor(finder.concurrency) as pool:
        while True:
            while found.stopped is None and len(running) < finder.concurrency:
                item = next(waiting, None)
                if item is None:
                    break
                running[pool.submit(_find, item, spans[item.key], finder)] = item
            if not running:
                return
            finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            if found.stopped is None and is_interrupted():
                found.stopped = "interrupted"
                finder.stop()
            for future in finished:
                item = running.pop(future)
                try:
                    yield item, future.result()
                except Unanswered:
                    continue
                except Exhausted as error:
                    found.stopped = str(error)
                    finder.stop()


def _spans(item: Item, cut: str, known: Graph | None) -> list[Span]:
    return steps_of(item.response, cut) if known is None else list(known.steps)


def _find(item: Item, spans: Sequence[Span], finder: Finder) -> Graph | Refusal:
    if not item.response.strip():
        return Refusal(["empty-response: there are no steps in it"])
    if not spans or spans[-1][1] != len(item.response):
        end = spans[-1][1] if spans else 0
        return Refusal([f"not-its-steps: they end at {end} and it at {len(item.response)}"])
    return finder.find(item, spans)


def check_finder(name: str) -> None:
    """Raises `InvalidInput` for a way to find graphs that there is not."""
    if name not in ("teacher", "likelihood"):
        raise InvalidInput(f"--by is {name!r}; graphs are found by teacher or likelihood")
