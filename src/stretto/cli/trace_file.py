"""The file that `stretto run --trace` writes: one answer, its segments and its events."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.completion import Completion
    from stretto.dialects.base import Vocabulary
    from stretto.params import SamplingParams

FORMAT = "stretto-trace"
VERSION = 1


def trace_document(
    completion: Completion, params: SamplingParams, dialect: str, vocabulary: Vocabulary
) -> dict[str, Any]:
    """The JSON object: the answer as `run --json` has it, then what `trace show --json` says.

    `token_ids`, `origins`, `markup` and `steps` of a segment stand beside its `tokens`, and of a
    block `num_passes`.
    """
    from stretto.cli.trace import describe
    from stretto.dialects.base import Parsed

    parsed = Parsed(completion.trace, completion.text, completion.issues)
    described = describe(dialect, parsed, vocabulary)
    for segment, shown in zip(completion.trace.segments, described["segments"], strict=True):
        shown["token_ids"] = list(segment.tokens)
        shown["origins"] = list(segment.origins)
        shown["markup"] = list(segment.markup)
        shown["steps"] = list(segment.steps)
        if segment.kind == "block":
            shown["num_passes"] = segment.num_passes
    answer = completion.to_json()
    head = {name: answer.pop(name) for name in ("method", "model", "engine", "seed")}
    return {
        "format": FORMAT,
        "version": VERSION,
        **head,
        "params": {**asdict(params), "stop_ids": sorted(params.stop_ids)},
        "prompt_tokens": completion.usage.prompt_tokens,
        "annotated": completion.annotated,
        **described,
        **answer,
        "events": _events(completion),
    }


def _events(completion: Completion) -> list[dict[str, Any]]:
    """All events in arrival order; the last two are the counts and the end."""
    from stretto.runtime.events import Done, Usage, to_json

    usage = Usage(asdict(completion.usage))
    done = Done(completion.text, completion.finish_reason)
    return [to_json(event) for event in (*completion.events, usage, done)]
