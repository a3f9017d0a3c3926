"""A recorded answer in Chrome's trace event format, which Perfetto and chrome://tracing open.

One track a thread, a slice for each run of tokens, an arrow for each fork and join, and counters of
live tokens. A step takes a millisecond, step `s` beginning at `s` ms, for steps are what a trace
file has; the prompt stands before step 1.

The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.cli.trace_read import Recorded
from stretto.pictures import EvictMark, ForkMark, JoinMark, marks, step_rows
from stretto.trace import Segment, Trace, is_prompt

STEP_US = 1000
MAX_NAME = 48
PROCESS = {"pid": 1}

Event = dict[str, Any]


def chrome_trace(recorded: Recorded) -> dict[str, Any]:
    """The JSON object that viewers of traces open."""
    trace = recorded.trace
    rows = step_rows(trace)
    tracks = {thread.name: number for number, thread in enumerate(trace.threads, start=1)}
    events = [*_names(recorded, tracks)]
    for segment, row, texts in zip(trace.segments, rows, recorded.texts, strict=True):
        track = tracks[segment.thread]
        events += [_slice(run, track) for run in _runs(segment, row, texts)]
    events += _arrows(trace, rows, tracks)
    events += _counters(trace, rows, recorded.placed)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"unit": "1 ms is one step", "model": recorded.model},
    }


def _names(recorded: Recorded, tracks: dict[str, int]) -> Iterator[Event]:
    what = f"{recorded.model}, {recorded.method}"
    yield {"ph": "M", "name": "process_name", **PROCESS, "args": {"name": what}}
    for thread in recorded.trace.threads:
        track = {**PROCESS, "tid": tracks[thread.name]}
        name = thread.name if thread.topic is None else f"{thread.name}: {thread.topic}"
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": name}}
        order = {"sort_index": tracks[thread.name]}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": order}


# -- slices ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one segment that were drawn in steps without a gap, from `first` to `last`."""

    segment: Segment
    kind: str
    first: int
    last: int
    text: str
    num_tokens: int


def _runs(segment: Segment, row: Sequence[int | None], texts: Sequence[str]) -> Iterator[Run]:
    if is_prompt(segment):
        yield Run(segment, "prompt", 0, 0, "".join(texts), len(segment))
        return
    if segment.kind == "block":
        steps = [step for step in row if step is not None]
        if steps:
            yield Run(segment, "block", min(steps), max(steps), "".join(texts), len(steps))
        return
    start = 0
    for end in range(1, len(row) + 1):
        if end < len(row) and _goes_on(segment, row, end):
            continue
        steps = [step for step in row[start:end] if step is not None]
        if steps:
            kind = "annotation" if segment.markup[start] else "text"
            yield Run(segment, kind, steps[0], steps[-1], "".join(texts[start:end]), len(steps))
        start = end


def _goes_on(segment: Segment, row: Sequence[int | None], at: int) -> bool:
    """Whether token `at` belongs to the run of the one before it."""
    before, after = row[at - 1], row[at]
    is_next = before is not None and after is not None and after == before + 1
    is_injected = before is None and after is None
    return (is_next or is_injected) and segment.markup[at] == segment.markup[at - 1]


def _slice(run: Run, track: int) -> Event:
    line = " ".join(run.text.split())
    name = line if len(line) <= MAX_NAME else line[: MAX_NAME - 1] + "…"
    return {
        "ph": "X",
        "name": name or run.kind,
        "cat": run.kind,
        **PROCESS,
        "tid": track,
        "ts": run.first * STEP_US,
        "dur": (run.last - run.first + 1) * STEP_US,
        "args": {
            "text": run.text,
            "num_tokens": run.num_tokens,
            "segment": run.segment.id,
            "role": run.segment.role,
        },
    }


# -- forks, joins, evictions -----------------------------------------------------------------------


def _arrows(
    trace: Trace, rows: Sequence[Sequence[int | None]], tracks: dict[str, int]
) -> Iterator[Event]:
    """An arrow leaves in the last microsecond of a step, so that it leaves from its slice."""
    for number, mark in enumerate(marks(trace), start=1):
        ends = (mark.step + 1) * STEP_US - 1
        match mark:
            case ForkMark(parent, child):
                begins = _first_step(trace, rows, child, mark.step)
                yield from _flow("fork", number, (tracks[parent], ends), (tracks[child], begins))
            case JoinMark(parent, child, segment):
                begins = _first_step(trace, rows, parent, mark.step, segment)
                yield from _flow("join", number, (tracks[child], ends), (tracks[parent], begins))
                yield _instant(f"join {child}", tracks[parent], ends)
            case EvictMark(thread, evicted):
                yield _instant(f"evict segment {evicted}", tracks[thread], ends)


def _first_step(
    trace: Trace, rows: Sequence[Sequence[int | None]], thread: str, after: int, segment: int = 0
) -> int | None:
    """The first step after `after` at which a thread drew a token of its segments from one on."""
    own = (rows[s.id] for s in trace.of_thread(thread) if s.id >= segment)
    steps = (step for row in own for step in row if step is not None and step > after)
    return min(steps, default=None)


def _flow(
    name: str, number: int, source: tuple[int, int], target: tuple[int, int | None]
) -> Iterator[Event]:
    """The two ends of an arrow, each a track and a time, the target's in steps; none if the
    target drew nothing."""
    track, step = target
    if step is None:
        return
    both = {"name": name, "cat": name, "id": number, **PROCESS}
    yield {"ph": "s", **both, "tid": source[0], "ts": source[1]}
    yield {"ph": "f", "bp": "e", **both, "tid": track, "ts": step * STEP_US}


def _instant(name: str, track: int, ts: int) -> Event:
    return {"ph": "i", "s": "t", "name": name, "cat": "view", **PROCESS, "tid": track, "ts": ts}


# -- live tokens -----------------------------------------------------------------------------------


def _counters(
    trace: Trace, rows: Sequence[Sequence[int | None]], placed: Sequence[int]
) -> Iterator[Event]:
    """Of each step, the most tokens that one placed then sees, itself included, and how many there
    were in all, which is what it would see with nothing hidden."""
    most: dict[int, int] = {}
    ends = [max((step for step in row if step is not None), default=0) for row in rows]
    for segment, row in zip(trace.segments, rows, strict=True):
        seen = sum(len(trace.segments[k]) for k in segment.sees)
        begins = max((ends[k] for k in segment.sees), default=0)
        for index, step in enumerate(row):
            if step is not None:
                at = max(step, begins)  # what is drawn before a wait is placed after it
                own = len(segment) if segment.kind == "block" else index + 1
                most[at] = max(most.get(at, 0), seen + own)
    num_placed, waiting = sum(len(s) for s in trace.prompt), list(reversed(placed))
    for step in sorted(most):
        while waiting and waiting[-1] <= step:
            waiting.pop()
            num_placed += 1
        for name, value in (("live tokens", most[step]), ("dense tokens", num_placed)):
            args = {"tokens": value}
            yield {"ph": "C", "name": name, **PROCESS, "ts": step * STEP_US, "args": args}
