"""A response cut into steps, and the edges that need no model: what a step says that another did.

An edge too many keeps a step longer than it need be; one too few forgets what is needed. So edges
of all kinds are added up: those that a teacher or a model finds, those of symbols, and that each
step reads the one before it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from stretto.data.graphs import Graph
from stretto.data.items import Item
from stretto.errors import UnknownName

CUTS = ("lines", "paragraphs", "sentences")
_STARTS = {
    "lines": re.compile(r"^(?=.*\S)", re.MULTILINE),
    "paragraphs": re.compile(r"(?:\A\s*|\n\s*\n\s*)(?=\S)"),
    "sentences": re.compile(r"(?:\A\s*|(?<=[.!?])\s+|\n\s*)(?=\S)"),
}
_NAME = re.compile(r"[^\W\d_]\w*")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*")
_SET = re.compile(r"([^\W\d_]\w*)\s*:?=(?!=)")
_RESULT = re.compile(r"[=:≈]\s*\$?-?(\d+(?:[.,]\d+)*)(?!\d)(?!\s*[-+*/^×·÷])")

Span = tuple[int, int]


def steps_of(response: str, cut: str) -> list[Span]:
    """Where each step stands: one begins with each line, paragraph or sentence that is not blank,
    and ends where the next begins, the last with the response. Raises `UnknownName`."""
    if cut not in CUTS:
        raise UnknownName("way to cut", cut, list(CUTS))
    starts = sorted({found.end() for found in _STARTS[cut].finditer(response)})
    return list(itertools.pairwise([*starts, len(response)]))


def symbol_reads(prompt: str, texts: Sequence[str]) -> list[list[int]]:
    """Of each step the earlier ones that it has a symbol of: the last that set a name that it says
    (`x = 3`), and the last that came to a number that it says, if the prompt has not that number.

    A rule of thumb: of words it knows nothing, and a number may be another one of the same digits.
    """
    given = set(_NUMBER.findall(prompt))
    last: dict[str, int] = {}
    found = []
    for number, text in enumerate(texts):
        said = [*_NAME.findall(text), *(n for n in _NUMBER.findall(text) if n not in given)]
        found.append(sorted({last[symbol] for symbol in said if symbol in last}))
        for symbol in (*_SET.findall(text), *_RESULT.findall(text)):
            last[symbol] = number
    return found


def graph_of(
    item: Item, spans: Sequence[Span], found: Sequence[Iterable[int]], annotator: str
) -> Graph:
    """The graph of a response: edges `found`, those of symbols, and each step's to the one before.
    `details` count what each kind adds to those before it."""
    texts = [item.response[a:b] for a, b in spans]
    own = [sorted(set(needed)) for needed in found]
    symbols = symbol_reads(item.prompt, texts)
    reads, added = [], {"found": 0, "symbols": 0, "follow": 0}
    for number, (model, shared) in enumerate(zip(own, symbols, strict=True)):
        follow = [number - 1] if number else []
        added["found"] += len(model)
        added["symbols"] += len(set(shared) - set(model))
        added["follow"] += len(set(follow) - set(model) - set(shared))
        reads.append(sorted({*model, *shared, *follow}))
    return Graph(
        id=item.key,
        steps=[*spans],
        reads=reads,
        annotator=annotator,
        details={"edges": added},
    )


def missing_edges(found: Graph, known: Graph) -> list[tuple[int, int]]:
    """Edges (step, what it reads) of a graph that is known and that the other one lacks: each of
    them would let a label forget what is needed. Of one response, cut in the same way."""
    pairs = zip(known.reads, found.reads, strict=True)
    return [(k, j) for k, (needed, own) in enumerate(pairs) for j in needed if j not in own]
