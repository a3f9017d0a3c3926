"""A trace is what a model wrote, cut into segments; `visible` says who may see what.

Nothing else in Stretto decides visibility: training masks, runtime views, live-KV figures and the
critical path are all derived from `visible` or from the `sees` sets that define it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from stretto.idset import IdSet

Kind = Literal["causal", "block"]
Origin = Literal["prompt", "sampled", "forced", "injected"]
"""prompt: given. sampled: drawn by the model. forced: drawn where a cap left one token legal.
injected: written by the runtime; costs no step and is never a training target."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one thread with the same view of the past.

    `sees` holds the ids of the other segments that every token of this one may attend. In a
    `block` segment the tokens see one another in both directions; in a `causal` one backwards.
    `markup` marks the tokens that are annotation and not part of the rendered text. `steps` holds
    the measured step at which each token was drawn, None where nothing was measured or drawn.
    `num_passes`: of a block, how many passes write it, its thread taking a step with each.
    """

    id: int
    thread: str
    kind: Kind
    role: str
    sees: Set[int]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    origins: tuple[Origin, ...]
    markup: tuple[bool, ...]
    steps: tuple[int | None, ...]
    num_passes: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


def visible(query: Segment, i: int, key: Segment, j: int) -> bool:
    """Whether token `i` of `query` may attend token `j` of `key`. This is the specification."""
    if key.id != query.id:
        return key.id in query.sees
    return query.kind == "block" or j <= i


@dataclass(frozen=True, slots=True)
class Thread:
    """One line of decoding. `finish_reason` is None for a thread that is only parsed text."""

    name: str
    parent: str | None
    topic: str | None
    finish_reason: str | None


@dataclass(frozen=True)
class Trace:
    """Segments in document order (`segments[i].id == i`) and threads in the order they began.

    Document order: a thread's segments in order, and the threads forked where a segment was cut
    directly after that segment. No segment is empty.
    """

    segments: tuple[Segment, ...]
    threads: tuple[Thread, ...]

    @property
    def prompt(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if is_prompt(s))

    @property
    def response(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if not is_prompt(s))

    @property
    def num_tokens(self) -> int:
        """All response tokens, control and injected ones included."""
        return sum(len(s) for s in self.response)

    @property
    def num_text_tokens(self) -> int:
        """Response tokens that are part of the rendered text."""
        return sum(not m for s in self.response for m in s.markup)

    def of_thread(self, name: str) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.thread == name)

    @cached_property
    def critical_path_steps(self) -> int:
        """The step of the last token drawn by any thread, the first being step 1; 0 for none."""
        return max(_derived(self)[1].values(), default=0)

    @property
    def parallelism(self) -> float:
        """Response tokens in the rendered text per step of the critical path; 0.0 without steps."""
        steps = self.critical_path_steps
        return self.num_text_tokens / steps if steps else 0.0


def is_prompt(segment: Segment) -> bool:
    return bool(segment.origins) and segment.origins[0] == "prompt"


def is_drawn(origin: Origin) -> bool:
    """Whether a token of this origin was drawn by the model, and so cost its thread a step."""
    return origin in ("sampled", "forced")


def derived_steps(trace: Trace) -> list[list[int | None]]:
    """The step of each drawn token, from structure alone, one list a segment.

    A thread draws one token a step. A forked thread starts after the last step its parent had
    taken at the fork. The first token of a segment that joins threads is drawn before the wait,
    the next one after the last step of every joined thread. A block takes a step a pass, its
    tokens drawn from left to right; where a drawn token joins it, that one is drawn first.
    """
    return _derived(trace)[0]


def _derived(trace: Trace) -> tuple[list[list[int | None]], dict[str, int]]:
    """What `derived_steps` returns, and the last step of each thread."""
    rows: list[list[int | None]] = []
    clock: dict[str, int] = {}
    parents = {t.name: t.parent for t in trace.threads}
    joins = _joins(trace)
    awaited = {
        name for s in trace.segments if is_drawn(s.origins[0]) for name in joins[s.id]
    }  # fmt: skip
    for segment in trace.segments:
        name, joined = segment.thread, joins[segment.id]
        is_block = segment.kind == "block"
        if name not in clock:
            clock[name] = clock.get(parents[name] or "", 0) + int(is_block and name in awaited)
        start = clock[name]
        joined_clock = max((clock[child] for child in joined), default=0)
        waits = bool(joined)
        if waits and not is_drawn(segment.origins[0]):
            clock[name] = max(clock[name], joined_clock)
            waits = False
        row: list[int | None] = []
        for origin in segment.origins:
            if not is_drawn(origin):
                row.append(None)
                continue
            clock[name] += 1
            row.append(clock[name])
            if waits:
                clock[name] = max(clock[name], joined_clock)
                waits = False
        if is_block:
            clock[name] = start + segment.num_passes
        rows.append(row)
    return rows, clock


def _joins(trace: Trace) -> list[set[str]]:
    """Of each segment, the threads that it joins: which its thread's segment before did not see."""
    before: dict[str, Set[int]] = {}
    found = []
    for s in trace.segments:
        fresh = s.sees - before.get(s.thread, s.sees)
        before[s.thread] = s.sees
        found.append({trace.segments[k].thread for k in fresh} - {s.thread})
    return found


@dataclass(frozen=True, slots=True)
class LiveTokens:
    """Tokens visible to a response token, itself included; over all response tokens.

    The `generated` figures leave the prompt's tokens out; `dense_mean` is what the mean would be
    with nothing hidden: prompt + index + 1.
    """

    mean: float
    peak: int
    generated_mean: float
    generated_peak: int
    dense_mean: float


def live_tokens(trace: Trace, page_size: int = 1) -> LiveTokens:
    """Live-KV figures of a trace; all zero for an empty response.

    With a page size all but `dense_mean` count the slots of the pages that hold those tokens, each
    segment on pages of its own.
    """

    def slots(num_tokens: int) -> int:
        return -(-num_tokens // page_size) * page_size

    prompt = sum(len(s) for s in trace.prompt)
    lives: list[int] = []
    generated: list[int] = []
    for segment, seen, seen_prompt in _seen_slots(trace, slots):
        for i in range(len(segment)):
            own = slots(len(segment) if segment.kind == "block" else i + 1)
            lives.append(seen + own)
            generated.append(seen - seen_prompt + own)
    if not lives:
        return LiveTokens(0.0, 0, 0.0, 0, 0.0)
    n = len(lives)
    return LiveTokens(
        mean=sum(lives) / n,
        peak=max(lives),
        generated_mean=sum(generated) / n,
        generated_peak=max(generated),
        dense_mean=prompt + (n + 1) / 2,
    )


def _seen_slots(trace: Trace, slots: Callable[[int], int]) -> Iterator[tuple[Segment, int, int]]:
    """Each response segment with the slots, and those of the prompt, that its `sees` amounts to.

    Counts from the thread's segment before, since two in a row see nearly the same.
    """
    before: dict[str, tuple[Set[int], int, int]] = {}
    for segment in trace.response:
        last, seen, seen_prompt = before.get(segment.thread, (frozenset(), 0, 0))
        for ids, sign in ((segment.sees - last, 1), (last - segment.sees, -1)):
            for k in ids:
                size = sign * slots(len(trace.segments[k]))
                seen += size
                seen_prompt += size if is_prompt(trace.segments[k]) else 0
        before[segment.thread] = segment.sees, seen, seen_prompt
        yield segment, seen, seen_prompt


def deaths(trace: Trace) -> list[int]:
    """When each token is hidden from its own thread: the place of that thread's first token that
    does not see it, in flat order, segment after segment; the trace's length if there is none.

    In a trace of one thread, without blocks, token `q` sees token `k` iff `k <= q < deaths[k]`.
    """
    starts = [0, *itertools.accumulate(map(len, trace.segments))]
    hidden = [starts[-1]] * len(trace.segments)
    before: dict[str, IdSet] = {}
    for s in trace.segments:
        for k in before.get(s.thread, IdSet()) - s.sees:
            if trace.segments[k].thread == s.thread:
                hidden[k] = starts[s.id]
        before[s.thread] = IdSet(bits=IdSet(s.sees).bits | 1 << s.id)
    return [hidden[s.id] for s in trace.segments for _ in s.tokens]


def labels(
    trace: Trace, end_of_sequence: int | None, *, ends_threads: bool = False
) -> list[list[int | None]]:
    """What each token is trained to predict, one list a segment; None where nothing is.

    A token predicts the next token of its own thread if the model drew that one; an injected or
    forced token is no target. The last prompt token predicts the first response token, the last
    token of `main` predicts `end_of_sequence`; with `ends_threads` so does that of every thread,
    except one that was cut short. Rows of `block` segments predict nothing here.
    """
    targets: list[list[int | None]] = [[None] * len(s) for s in trace.segments]
    for thread in trace.threads:
        places = [
            (s.id, i)
            for s in trace.of_thread(thread.name)
            if s.kind == "causal"
            for i in range(len(s))
        ]
        for (s, i), (t, j) in itertools.pairwise(places):
            if trace.segments[t].origins[j] == "sampled":
                targets[s][i] = trace.segments[t].tokens[j]
        is_ended = thread.parent is None or (
            ends_threads and thread.finish_reason in (None, "stop")
        )
        if is_ended and places and end_of_sequence is not None:
            s, i = places[-1]
            targets[s][i] = end_of_sequence
    return targets


def text_runs(trace: Trace) -> Iterator[tuple[int, ...]]:
    """The runs of text tokens in document order. A run ends at markup or where threads change."""
    run: list[int] = []
    thread = None
    for segment in trace.response:
        if segment.thread != thread:
            if run:
                yield tuple(run)
            run, thread = [], segment.thread
        for token, markup in zip(segment.tokens, segment.markup, strict=True):
            if not markup:
                run.append(token)
            elif run:
                yield tuple(run)
                run = []
    if run:
        yield tuple(run)
