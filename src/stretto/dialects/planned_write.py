"""Dialect `planned`, written down: a trace to its annotated text. `planned_text` reads that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stretto.dialects.base import Issue, Vocabulary
from stretto.dialects.pasta import child_name
from stretto.dialects.pasta_text import TagWriter, in_order
from stretto.dialects.planned import PlannedSettings
from stretto.dialects.planned_masks import MASK
from stretto.dialects.planned_text import parse_ids
from stretto.dialects.tags import PROMISE_END
from stretto.trace import Segment, Trace

DECODED = ("span-too-long", "unfinished-promise")
"""Issues of ids that are none of a decoded answer, or that its session has named."""


def to_text(
    trace: Trace, vocabulary: Vocabulary, settings: PlannedSettings
) -> tuple[str, dict[tuple[int, int], int]]:
    """The annotated text of a trace, and where tokens stand in it.

    A round's blocks stand after its plan; where a plan holds text, which may read like a tag, each
    stands right after its promise, so that no tag of the text can take its place.

    Offsets are in code points and keyed by (segment id, token index). They are exact for control
    tokens, also those that are text; other tokens have the offset of the run they stand in, and
    those of a promise that of its tag. A block without an end gets one, and what was not written
    of it is left out.
    """
    writer = RoundWriter.of(trace, vocabulary, settings)
    return writer.text, writer.tags.offsets


class RoundWriter:
    """Turns the rounds of a trace into annotated text, in order. `ends`: by a plan's segment id,
    where in the text the plan ends."""

    def __init__(self, vocabulary: Vocabulary, settings: PlannedSettings) -> None:
        self.tags = TagWriter(vocabulary, settings.unit)
        self.ends: dict[int, int] = {}
        self._control = vocabulary.control
        self._num_promises = 0

    @classmethod
    def of(cls, trace: Trace, vocabulary: Vocabulary, settings: PlannedSettings) -> RoundWriter:
        """One that has written the whole trace."""
        writer, response = cls(vocabulary, settings), trace.response
        plans = [i for i, segment in enumerate(response) if segment.kind == "causal"]
        for at, end in pairwise([*plans, len(response)]):
            writer.write(response[at], response[at + 1 : end])
        writer.tags.enter(None)
        return writer

    @property
    def text(self) -> str:
        return "".join(self.tags.pieces)

    def write(self, plan: Segment, spans: Sequence[Segment]) -> None:
        """Writes a round, whose spans are given in the order of their promises."""
        left = {span.thread: span for span in spans}
        holds_text = not all(plan.markup)
        self.tags.enter(plan.thread)
        for index, (token, markup) in enumerate(zip(plan.tokens, plan.markup, strict=True)):
            self.tags.write((plan.id, index), token, markup)
            if markup and token == self._control[PROMISE_END]:
                self._num_promises += 1
                span = left.pop(child_name(self._num_promises), None) if holds_text else None
                if span is not None:
                    self._write_span(span)
                    self.tags.enter(plan.thread)
        self.ends[plan.id] = self.tags.end()
        for span in left.values():
            self._write_span(span)

    def _write_span(self, span: Segment) -> None:
        self.tags.enter(span.thread)
        for index, (token, markup) in enumerate(zip(span.tokens, span.markup, strict=True)):
            if not (markup and token == self._control[MASK]):
                self.tags.write((span.id, index), token, markup)


def described(
    trace: Trace,
    vocabulary: Vocabulary,
    settings: PlannedSettings,
    issues: Sequence[tuple[str, tuple[int, int]]],
) -> tuple[str, tuple[Issue, ...]]:
    """The text form of a trace that was decoded, and what is malformed in it: these `issues`, at
    tokens by (segment id, index), and what its ids show. An index beyond a plan's last token is
    main's next one. How long a span is was the runtime's choice, and is no issue."""
    writer = RoundWriter.of(trace, vocabulary, settings)
    text, offsets = writer.text, writer.tags.offsets
    plans = [segment.id for segment in trace.response if segment.kind == "causal"]

    def place(key: tuple[int, int]) -> int:
        later = [(plan, 0) for plan in plans if plan > key[0]]
        known = (k for k in (key, *later) if k in offsets)
        return next((offsets[k] for k in known), writer.ends.get(key[0], 0))

    keys = list(offsets)
    ids = [trace.segments[segment].tokens[index] for segment, index in keys]
    found = parse_ids([], ids, vocabulary, settings).issues
    at_ids = [(i.code, keys[i.at]) for i in found if i.code not in DECODED]
    return text, in_order([Issue(code, place(key)) for code, key in [*issues, *at_ids]])
