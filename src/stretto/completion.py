"""A finished answer: text, threads, counts, live-KV figures and timings, as Python and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stretto.dialects.base import Issue
from stretto.recorder import MAIN
from stretto.trace import Trace, is_drawn, live_tokens

if TYPE_CHECKING:
    from stretto.runtime.events import Event
    from stretto.runtime.request import Request


@dataclass(frozen=True, slots=True)
class ThreadOutput:
    """What one thread wrote. `text` is its own, without its children's; steps are of the first
    and last token it drew, None if none. `num_tokens` counts what it drew, control tokens
    included, `injected_tokens` what the runtime wrote for it."""

    id: str
    parent: str | None
    topic: str | None
    text: str
    num_tokens: int
    injected_tokens: int
    start_step: int | None
    end_step: int | None
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. End-of-sequence and stop ids are in none of them.

    `completion_tokens`: drawn tokens with at least one character in the text. `control_tokens`:
    drawn annotation tokens (control, topic and number tokens; an outline). `cut_tokens`: text
    tokens that a stop string cut off. `capped_threads`: forked threads that ended with "length".
    `cached_tokens`: prompt tokens that were not computed, since an earlier prompt began with them.
    """

    prompt_tokens: int
    completion_tokens: int
    control_tokens: int
    cut_tokens: int
    sequential_steps: int
    capped_threads: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class LiveKV:
    """Tokens visible to a response token, itself included; `dense_mean` with nothing hidden.

    `pool_mean_slots`, `pool_peak_slots`: page size times the pages that the request held in a pass,
    full or not, shared ones once: the mean over its passes, those of its prompt included, and most.
    """

    mean: float
    peak: int
    generated_mean: float
    generated_peak: int
    dense_mean: float
    pool_mean_slots: float
    pool_peak_slots: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall clock in seconds: to the first token, from it to the end, and both together.

    `tokens_per_s`: completion tokens per second of `decode_s`, 0.0 if that is 0.
    """

    ttft_s: float
    decode_s: float
    total_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Speedup:
    """`parallelism`: completion tokens per sequential step. `theoretical`: tokens of the
    sequential baseline's response per sequential step. `realized`: the baseline's decode time by
    this one's. The last two are None unless a baseline was run."""

    parallelism: float
    theoretical: float | None = None
    realized: float | None = None


@dataclass(frozen=True)
class Completion:
    """An answer. `annotated` is the text form with annotations, which `issues` point into."""

    text: str
    finish_reason: str
    method: str
    model: str
    engine: str
    seed: int
    threads: tuple[ThreadOutput, ...]
    usage: Usage
    live_kv: LiveKV
    timing: Timing
    speedup: Speedup
    issues: tuple[Issue, ...]
    annotated: str = field(repr=False)
    trace: Trace = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The object that `stretto run --json` prints."""
        names = ("text", "finish_reason", "method", "model", "engine", "seed")
        parts = {
            "threads": [_fields(thread) for thread in self.threads],
            "usage": _fields(self.usage),
            "live_kv": _fields(self.live_kv),
            "timing": _fields(self.timing),
            "speedup": _fields(self.speedup),
            "issues": [_fields(issue) for issue in self.issues],
        }
        return {name: getattr(self, name) for name in names} | parts

    def compared(self, theoretical: float, realized: float) -> Completion:
        """This completion with the speed-ups over a sequential baseline filled in."""
        speedup = replace(self.speedup, theoretical=theoretical, realized=realized)
        return replace(self, speedup=speedup)


def complete(
    request: Request,
    *,
    method: str,
    model: str,
    engine: str,
    page_size: int,
    annotated: str,
    issues: tuple[Issue, ...],
) -> Completion:
    """The completion of a request that is done. Raises `ValueError` for one that is not."""
    if request.finish_reason is None:
        raise ValueError("the request is not done")
    trace = request.recorder.freeze()
    usage = count_usage(request, trace)
    steps = usage.sequential_steps
    return Completion(
        text=request.text,
        finish_reason=request.finish_reason,
        method=method,
        model=model,
        engine=engine,
        seed=request.params.seed,
        threads=_threads(request, trace),
        usage=usage,
        live_kv=_live_kv(request, trace, page_size),
        timing=_timing(request, usage),
        speedup=Speedup(usage.completion_tokens / steps if steps else 0.0),
        issues=issues,
        annotated=annotated,
        trace=trace,
        events=tuple(request.log.events),
    )


def _fields(value: Any) -> dict[str, Any]:
    """`asdict` of a dataclass with slots and plain values, without the copies, which take most of
    its time."""
    return {name: getattr(value, name) for name in value.__slots__}


def _live_kv(request: Request, trace: Trace, page_size: int) -> LiveKV:
    memory = request.memory
    return LiveKV(
        **_fields(live_tokens(trace)),
        pool_mean_slots=page_size * memory.mean_pages,
        pool_peak_slots=page_size * memory.peak_pages,
    )


def count_usage(request: Request, trace: Trace) -> Usage:
    """Counts of a request that is done."""
    length = len(request.text)
    written = request.document.tokens
    num_completion = sum(is_drawn(t.origin) and t.start < length for t in written)
    drawn = [
        markup
        for s in trace.response
        for origin, markup in zip(s.origins, s.markup, strict=True)
        if is_drawn(origin)
    ]
    num_control = sum(drawn)
    threads = request.recorder.threads.values()
    return Usage(
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=num_completion,
        control_tokens=num_control,
        cut_tokens=len(drawn) - num_control - num_completion,
        sequential_steps=max(
            (step for s in trace.response for step in s.steps if step is not None), default=0
        ),
        capped_threads=sum(t.name != MAIN and t.finish_reason == "length" for t in threads),
        cached_tokens=request.memory.num_adopted,
    )


def _threads(request: Request, trace: Trace) -> tuple[ThreadOutput, ...]:
    from stretto.runtime.events import ThreadEnd, Token

    texts = {thread.name: "" for thread in trace.threads}
    for event in request.log.events:
        if isinstance(event, Token | ThreadEnd):
            texts[event.thread] += event.text
    outputs = []
    for thread in trace.threads:
        own = [s for s in trace.of_thread(thread.name) if s.origins[0] != "prompt"]
        origins = [origin for s in own for origin in s.origins]
        steps = [step for s in own for step in s.steps if step is not None]
        outputs.append(
            ThreadOutput(
                id=thread.name,
                parent=thread.parent,
                topic=thread.topic,
                text=texts[thread.name],
                num_tokens=sum(map(is_drawn, origins)),
                injected_tokens=origins.count("injected"),
                start_step=min(steps, default=None),
                end_step=max(steps, default=None),
                finish_reason=thread.finish_reason or "error",
            )
        )
    return tuple(outputs)


def _timing(request: Request, usage: Usage) -> Timing:
    timing = request.timing
    end = timing.finished if timing.finished is not None else timing.submitted
    first = timing.first_token if timing.first_token is not None else end
    decode_s = end - first
    return Timing(
        ttft_s=first - timing.submitted,
        decode_s=decode_s,
        total_s=end - timing.submitted,
        tokens_per_s=usage.completion_tokens / decode_s if decode_s > 0 else 0.0,
    )
