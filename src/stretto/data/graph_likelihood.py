"""Dependence graphs by measurement: does hiding a step make a later one less likely?

The response is laid out once in plain order, and each later step once more for each earlier one,
seeing all but that. As in decoding with registers, what stands between has still seen the hidden
step; so what is measured is what letting go of its keys and values does, not what editing it out of
the text would. Step k reads step j if hiding j lowers the log-likelihood of k by `max_loss` nats or
more in all: one value in a step may be all that depends on it, so the sum counts, not the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.data.annotators import Refusal
from stretto.data.graph_steps import Span, graph_of
from stretto.data.graphs import Graph
from stretto.data.items import Item
from stretto.data.likelihood_scorer import BATCH_TOKENS, Scorer
from stretto.data.likelihood_views import Sheet
from stretto.errors import InvalidInput
from stretto.idset import IdSet

DEFAULT_MAX_LOSS = 1.0

Pair = tuple[int, int]
"""A step, and the earlier one that is hidden from it."""


@dataclass
class LaidOut:
    """A sheet, and the numbers of its readings: of whole views by step, of others by pair."""

    sheet: Sheet = field(default_factory=Sheet)
    whole: dict[int, int] = field(default_factory=dict)
    hidden: dict[Pair, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LikelihoodGraphs:
    """Finds the graph of a response with a scorer. Each step reads the one before it in any case,
    so that pair is not measured."""

    scorer: Scorer
    max_loss: float = DEFAULT_MAX_LOSS
    name: str = "likelihood"
    concurrency: int = 1

    def find(self, item: Item, spans: Sequence[Span]) -> Graph | Refusal:
        try:
            prompt = self.scorer.prompt_ids(item.prompt)
            encode = self.scorer.vocabulary.encode
            steps = [encode(item.response[a:b]) for a, b in spans]
            lead = encode(item.response[: spans[0][0]])
        except InvalidInput as error:
            return Refusal([f"not-encodable: {error}"])
        prompt = [*prompt, *lead]
        size = len(prompt) + sum(map(len, steps))
        if size > self.scorer.max_positions:
            reads = self.scorer.max_positions
            return Refusal([f"too-long: {size} tokens, and {self.scorer.name} reads {reads}"])
        losses = self.losses(prompt, steps)
        found: list[list[int]] = [[] for _ in steps]
        for (step, hidden), loss in losses.items():
            if loss >= self.max_loss:
                found[step].append(hidden)
        graph = graph_of(item, spans, found, self.name)
        return graph.model_copy(update={"details": graph.details | {"max_loss": self.max_loss}})

    def losses(self, prompt: Sequence[int], steps: Sequence[Sequence[int]]) -> dict[Pair, float]:
        """Of each pair the nats that the step loses where the earlier one is hidden from it."""
        found: dict[Pair, float] = {}
        for laid in lay_out(prompt, steps):
            (read,) = self.scorer.score([laid.sheet])
            for pair, number in laid.hidden.items():
                gap = read[laid.whole[pair[0]]] - read[number]
                found[pair] = float(np.sum(gap, dtype=np.float64))
        return found

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def lay_out(
    prompt: Sequence[int], steps: Sequence[Sequence[int]], most_tokens: int = BATCH_TOKENS
) -> Iterator[LaidOut]:
    """Sheets that have every pair of a step and one before it but its neighbour, each once: about
    `most_tokens` tokens a sheet, or one pair."""
    pairs = [(k, j) for k, j in itertools.product(range(len(steps)), repeat=2) if j < k - 1]
    base = len(prompt) + sum(map(len, steps))
    batch: list[Pair] = []
    size = base
    for pair in pairs:
        if batch and size + len(steps[pair[0]]) > most_tokens:
            yield _laid_out(prompt, steps, batch)
            batch, size = [], base
        batch.append(pair)
        size += len(steps[pair[0]])
    if batch:
        yield _laid_out(prompt, steps, batch)


def _laid_out(
    prompt: Sequence[int], steps: Sequence[Sequence[int]], pairs: Sequence[Pair]
) -> LaidOut:
    laid = LaidOut()
    sheet = laid.sheet
    seen = [sheet.add(prompt, IdSet(), None, "prompt")]
    asked = {step for step, _ in pairs}
    for number, ids in enumerate(steps):
        segment = sheet.add(ids, IdSet(seen), seen[-1], "full")
        if number in asked:
            laid.whole[number] = sheet.read(segment, seen[-1])
        seen.append(segment)
    for step, hidden in pairs:
        before = seen[: step + 1]
        sees = IdSet(s for s in before if s != seen[hidden + 1])
        branch = sheet.add(steps[step], sees, before[-1], "branch")
        laid.hidden[step, hidden] = sheet.read(branch, before[-1])
    return laid
