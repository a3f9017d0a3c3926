"""What annotated rows, or sampled answers, amount to: promises, lengths, speedup."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.data.check import Checker
from stretto.data.rows import Annotated, Answer
from stretto.dialects.base import Parsed
from stretto.dialects.pasta import child_name
from stretto.dialects.tags import SYNC
from stretto.errors import InvalidInput
from stretto.recorder import MAIN
from stretto.trace import LiveTokens, Trace, derived_steps, live_tokens

BINS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Lower ends of the histogram's bins of theoretical speedup; below 1 is a bin too."""

DEFINITIONS = {
    "speedup": "tokens of the response without annotations per critical-path step (theoretical)",
    "parallelism": "response tokens in the text per critical-path step",
    "threads": "most threads that draw a token in the same step",
    "length_ratio": "tokens of a chunk per token promised, chunks with text only",
    "in_chunks": "share of the response's tokens that stand in chunks",
    "live_tokens": "response tokens that one of them sees, itself and control tokens included: "
    "mean over tokens and rows, the most of any; dense: with nothing forgotten",
}


@dataclass(frozen=True)
class Facts:
    """One row in figures. `chunks`: (tokens promised, tokens written) of each promise."""

    num_tokens: int
    steps: int
    parallelism: float
    threads: int
    num_syncs: int
    num_idle_syncs: int
    chunks: tuple[tuple[int, int], ...]
    num_chunk_tokens: int
    live: LiveTokens

    @property
    def speedup(self) -> float:
        return self.num_tokens / self.steps if self.steps else 0.0


def facts_of(row: Annotated | Answer, checker: Checker) -> Facts:
    """A row's figures. Raises `InvalidInput` for a text that cannot be encoded, and for ids that
    the checker's tokenizer or dialect cannot tell the meaning of."""
    if isinstance(row, Answer):
        parsed, num_tokens = _parsed_ids(row, checker), row.completion_tokens
    else:
        parsed, num_tokens = checker.parse(row.annotated), checker.count(row.response)
    trace = parsed.trace
    return Facts(
        num_tokens=num_tokens,
        steps=trace.critical_path_steps,
        parallelism=trace.parallelism,
        threads=most_threads(trace),
        chunks=_chunks(trace, checker),
        num_chunk_tokens=sum(
            not markup for s in trace.response if s.thread != MAIN for markup in s.markup
        ),
        live=live_tokens(trace),
        **_syncs(trace, checker),
    )


def _parsed_ids(row: Answer, checker: Checker) -> Parsed:
    from stretto.dialects.pasta_text import parse_ids

    if checker.dialect != "pasta":
        raise InvalidInput(
            f"sampled answers are read as pasta, not as {checker.dialect}, whose ids alone do not "
            "say where threads end; annotated rows are read as either"
        )
    size = checker.vocabulary.size
    if (outside := max(row.ids, default=0)) >= size:
        raise InvalidInput(
            f"answer {row.key} has token id {outside} and the tokenizer has {size}; name the "
            "tokenizer of the model that wrote it"
        )
    return parse_ids([], row.ids, checker.vocabulary, checker.settings)


def most_threads(trace: Trace) -> int:
    """The most threads that draw a token in the same step."""
    busy: Counter[int] = Counter()
    for row in derived_steps(trace):
        busy.update(step for step in row if step is not None)
    return max(busy.values(), default=0)


def _chunks(trace: Trace, checker: Checker) -> tuple[tuple[int, int], ...]:
    """Promised and written tokens of each chunk; `written` leaves the tags out."""
    promises = _promises(trace, checker)
    found = []
    for number, length in enumerate(promises, start=1):
        segments = trace.of_thread(child_name(number))
        found.append((length, sum(not m for s in segments for m in s.markup)))
    return tuple(found)


def _promises(trace: Trace, checker: Checker) -> list[int]:
    from stretto.dialects.tags import id_tags

    if checker.dialect != "pasta":
        return []
    main = [t for s in trace.response if s.thread == MAIN for t in _markup(s.tokens, s.markup)]
    tags, _ = id_tags(main, checker.vocabulary, checker.settings.unit)
    return [tag.length for tag in tags if tag.kind == "promise"]


def _markup(tokens: Sequence[int], markup: Sequence[bool]) -> list[int]:
    return [token for token, is_markup in zip(tokens, markup, strict=True) if is_markup]


def _syncs(trace: Trace, checker: Checker) -> dict[str, int]:
    """How many syncs there are, and how many of them join nothing."""
    sync = checker.vocabulary.control.get(SYNC)
    num_syncs = num_idle = 0
    seen: frozenset[str] = frozenset()
    for segment in trace.of_thread(MAIN):
        threads = frozenset(trace.segments[k].thread for k in segment.sees) - {MAIN}
        if segment.tokens[0] == sync and segment.markup[0]:
            num_syncs += 1
            num_idle += threads == seen
        seen = threads
    return {"num_syncs": num_syncs, "num_idle_syncs": num_idle}


# -- over many rows --------------------------------------------------------------------------------


def summary(rows: Iterable[Facts]) -> dict[str, Any]:
    """Figures over rows; `DEFINITIONS` says what they are. Geometric means for ratios."""
    facts = list(rows)
    chunks = [chunk for fact in facts for chunk in fact.chunks]
    written = [(promised, tokens) for promised, tokens in chunks if tokens]
    ratios = [tokens / promised for promised, tokens in written]
    total = sum(fact.num_tokens for fact in facts)
    return {
        "rows": len(facts),
        "with_promises": sum(bool(fact.chunks) for fact in facts),
        "two_threads_or_more": sum(fact.threads > 1 for fact in facts),
        "tokens": total,
        "promises": len(chunks),
        "promises_per_row": _counts(len(fact.chunks) for fact in facts),
        "syncs": sum(fact.num_syncs for fact in facts),
        "syncs_per_row": _counts(fact.num_syncs for fact in facts),
        "idle_syncs": sum(fact.num_idle_syncs for fact in facts),
        "chunk_tokens": quantiles([tokens for _, tokens in chunks]),
        "promised_tokens": quantiles([promised for promised, _ in chunks]),
        "length_ratio": quantiles(ratios) | {"geomean": geomean(ratios)},
        "longer_than_promised": sum(tokens > promised for promised, tokens in chunks),
        "in_chunks": sum(fact.num_chunk_tokens for fact in facts) / total if total else 0.0,
        "live_tokens": {
            "mean": _mean([fact.live.generated_mean for fact in facts]),
            "peak": max((fact.live.generated_peak for fact in facts), default=0),
            "dense": _mean([fact.live.dense_mean for fact in facts]),
        },
        "speedup": _ratio([fact.speedup for fact in facts]),
        "parallelism": _ratio([fact.parallelism for fact in facts]),
        "speedup_histogram": histogram([fact.speedup for fact in facts]),
    }


def _counts(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


def _ratio(values: Sequence[float]) -> dict[str, float]:
    return quantiles(values) | {"geomean": geomean(values), "mean": _mean(values)}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def geomean(values: Sequence[float]) -> float:
    """The geometric mean; 0.0 of nothing. What is not above 0 (an empty row) is left out."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(statistics.fmean(logs)) if logs else 0.0


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Least, tenth, fifth, ninth decile and largest, nearest-rank; zeros of nothing."""
    ordered = sorted(values) or [0]
    shares = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in shares.items()}


def histogram(values: Sequence[float]) -> dict[str, int]:
    """Counts by bins `[low, high)`, named low-high; the first is below and the last above all."""
    names = [f"<{BINS[0]:g}", *(f"{a:g}-{b:g}" for a, b in itertools.pairwise(BINS))]
    names.append(f">={BINS[-1]:g}")
    counts = dict.fromkeys(names, 0)
    for value in values:
        counts[names[sum(value >= low for low in BINS)]] += 1
    return counts
