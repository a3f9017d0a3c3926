"""Blocks in training traces: filled up to what was promised, or the whole answer without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from stretto.dialects.base import BlockRules
from stretto.effects import Join, Place
from stretto.methods.diffusion import Window
from stretto.recorder import MAIN, Recorder
from stretto.trace import Segment, Trace

T = TypeVar("T")


def filled(trace: Trace, filler: int) -> Trace:
    """The trace with each block as long as it is promised: fillers after what is written, before
    the tag that ends it. Positions of all else leave room for them already."""
    return replace(trace, segments=tuple(_filled(s, filler) for s in trace.segments))


def in_spans(trace: Trace) -> Bool[Tensor, "tokens"]:
    """Which tokens stand in blocks and are the model's to write, in any order; fillers are."""
    return torch.tensor(
        [s.kind == "block" and o == "sampled" for s in trace.segments for o in s.origins],
        dtype=torch.bool,
    )


def _filled(segment: Segment, filler: int) -> Segment:
    if segment.kind != "block":
        return segment
    num_before = int(segment.origins[0] == "injected")
    end = len(segment) - int(len(segment) > num_before and segment.origins[-1] == "injected")
    missing = segment.num_passes - (end - num_before)

    def longer(values: tuple[T, ...], value: T) -> tuple[T, ...]:
        return (*values[:end], *(value for _ in range(missing)), *values[end:])

    first = segment.positions[0]
    return replace(
        segment,
        tokens=longer(segment.tokens, filler),
        positions=tuple(range(first, first + len(segment) + missing)),
        origins=longer(segment.origins, "sampled"),
        markup=longer(segment.markup, True),
        steps=longer(segment.steps, None),
    )


def plan_free_trace(
    prompt: Sequence[int],
    answer: Sequence[int],
    rules: BlockRules,
    window: Window,
    max_positions: int | None,
) -> Trace:
    """The trace of an answer without a plan, as `methods.diffusion` decodes it: blocks, and
    between two of them what the runtime writes there."""
    count = window.num_blocks(len(answer))
    ids = [*answer, *[rules.filler] * (count * window.block - len(answer))]
    recorder = Recorder(list(prompt), rules.main_role, max_positions)
    main = recorder.threads[MAIN]
    for number in range(1, count + 1):
        effect = rules.block(number, window.block, main.next_position)
        span = recorder.open_block(main, effect)
        for token in effect.before:
            recorder.place(span, Place(token, "injected", markup=True))
        for token in ids[(number - 1) * window.block : number * window.block]:
            recorder.place(span, Place(token, markup=token == rules.filler))
        for token in effect.after:
            recorder.place(span, Place(token, "injected", markup=True))
        span.own.num_passes = window.block
        recorder.close(span, "stop")
        recorder.fed(span, len(span.unfed))
        if number < count:
            recorder.join(main, Join((span.name,)))
            recorder.place(main, Place(rules.between, "injected", markup=True))
    return recorder.freeze()
