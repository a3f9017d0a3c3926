"""Blocks in training traces: filled up to what was promised, or the whole answer without a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from stretto.dialects import Card
from stretto.dialects.base import Legal, Vocabulary
from stretto.dialects.planned import PlannedSession, PlannedSettings
from stretto.dialects.planned_masks import MASK, PAD, PlannedMasks
from stretto.dialects.tags import ASYNC, ASYNC_END, SYNC
from stretto.effects import Join, Place
from stretto.methods.diffusion import Window
from stretto.recorder import MAIN, Recorder
from stretto.trace import Segment, Trace

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SpanRules:
    """What a model that writes blocks is trained with: how they are laid out, the id of a token
    that is hidden, the filler, and what may stand in a block."""

    settings: PlannedSettings
    mask: int
    filler: int
    legal: Legal

    @classmethod
    def of(cls, vocabulary: Vocabulary, card: Card, max_positions: int | None) -> SpanRules | None:
        """Those of a model's card; None if its dialect writes no blocks."""
        if card.variant is None or card.convention is None:
            return None
        settings = PlannedSettings(card.variant, card.convention, card.unit, max_positions)
        control = vocabulary.control
        legal = PlannedMasks(vocabulary, card.unit).span
        return cls(settings, control[MASK], control[PAD], legal)


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
    prompt: Sequence[int], answer: Sequence[int], control: Mapping[str, int],
    settings: PlannedSettings, window: Window,
) -> Trace:  # fmt: skip
    """The trace of an answer without a plan, as `methods.diffusion` decodes it: blocks, and
    between two of them a `<sync/>` that the runtime writes."""
    count = window.num_blocks(len(answer))
    ids = [*answer, *[control[PAD]] * (count * window.block - len(answer))]
    recorder = Recorder(list(prompt), PlannedSession.main_role, settings.max_positions)
    main = recorder.threads[MAIN]
    for number in range(1, count + 1):
        effect = settings.span(control, number, window.block, main.next_position, "")
        span = recorder.open_block(main, effect)
        recorder.place(span, Place(control[ASYNC], "injected", markup=True))
        for token in ids[(number - 1) * window.block : number * window.block]:
            recorder.place(span, Place(token, markup=token == control[PAD]))
        recorder.place(span, Place(control[ASYNC_END], "injected", markup=True))
        span.own.num_passes = window.block
        recorder.close(span, "stop")
        recorder.fed(span, len(span.unfed))
        if number < count:
            recorder.join(main, Join((span.name,)))
            recorder.place(main, Place(control[SYNC], "injected", markup=True))
    return recorder.freeze()
