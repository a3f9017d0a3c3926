"""What `stretto run` says of an answer, in a line or two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.completion import Completion
    from stretto.params import SamplingParams


def summary_lines(
    completion: Completion, params: SamplingParams, baseline: Completion | None, pairs: int
) -> Iterator[str]:
    """The counts and timings, what did not go as planned, and the comparison if there is one."""
    usage, timing = completion.usage, completion.timing
    num_threads = len(completion.threads)
    yield ", ".join(
        [
            f"{completion.method}: {count(usage.completion_tokens, 'token')}"
            f" by {count(num_threads, 'thread')}"
            f" in {count(usage.sequential_steps, 'step')}"
            f" ({completion.speedup.parallelism:.2f} a step)",
            f"{timing.total_s:.1f} s",
            f"{timing.tokens_per_s:.1f} tokens/s",
            f"engine {completion.engine}",
            *_notes(completion, params),
        ]
    )
    if baseline is not None:
        yield _comparison(completion, baseline, pairs)


def _notes(completion: Completion, params: SamplingParams) -> Iterator[str]:
    """What the reader should know: an early end, cut threads, issues."""
    usage = completion.usage
    if completion.finish_reason == "cancelled":
        yield "interrupted"
    elif completion.finish_reason == "error":
        yield "failed before its end"
    elif completion.finish_reason == "length":
        num_drawn = sum(thread.num_tokens for thread in completion.threads)
        is_budget = num_drawn >= params.max_tokens
        yield f"cut at --max-tokens {params.max_tokens}" if is_budget else "cut: no room left"
    if usage.capped_threads and completion.finish_reason == "stop":
        yield f"{count(usage.capped_threads, 'thread')} cut at their cap"
    if completion.issues:
        yield f"{count(len(completion.issues), 'issue')} in the annotations (--json names them)"


def _comparison(completion: Completion, baseline: Completion, pairs: int) -> str:
    speedup = completion.speedup
    measured = f"median of {pairs} pairs" if pairs > 1 else "1 pair"
    cut = " (cut off)" if baseline.finish_reason == "length" else ""
    return (
        f"decoding: sequential {count(baseline.usage.completion_tokens, 'token')}{cut}"
        f" in {baseline.timing.decode_s:.1f} s,"
        f" {completion.method} {count(completion.usage.completion_tokens, 'token')}"
        f" in {completion.timing.decode_s:.1f} s;"
        f" speed-up {speedup.theoretical or 0.0:.2f} theoretical{_made_of(completion, baseline)},"
        f" {speedup.realized or 0.0:.2f} realized ({measured})"
    )


def _made_of(completion: Completion, baseline: Completion) -> str:
    """The two factors of a theoretical speed-up: a method may gain by writing more at a time, and
    by saying less."""
    ours, theirs = completion.usage.completion_tokens, baseline.usage.completion_tokens
    if not ours or not theirs:
        return ""
    return (
        f" ({completion.speedup.parallelism:.2f} tokens a step, an answer {ours / theirs:.2f} times"
        " as long)"
    )


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
