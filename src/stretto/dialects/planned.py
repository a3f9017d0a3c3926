"""Dialect `planned`: a plan of promises, then all promised spans are written at once.

Planned Diffusion (Israel et al., arXiv 2510.18087). Main promises topics and lengths and ends its
plan with `<sync/>`, after which another plan follows, or with the end. The spans of a plan are
blocks of masks that are denoised together; what follows sees them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from stretto.dialects.base import Issue, Legal
from stretto.dialects.pasta import TagPlace, child_name, next_place
from stretto.dialects.planned_masks import MASK, PAD, PlannedMasks
from stretto.dialects.tags import ASYNC, ASYNC_END, SYNC, TAG_FORMS, PromiseReader, Tag
from stretto.effects import Close, Denoise, Join, Move, Place, Reveal, Wait
from stretto.recorder import OpenThread, Recorder

Variant = Literal["sparse", "dense"]
Convention = Literal["shifted", "aligned"]

PLANNED_FORMS: Mapping[str, str] = {**TAG_FORMS, PAD: "[PAD]", MASK: "[MASK]"}
"""Names of the control tokens and their text forms."""

SPAN_ROLE = "span"


@dataclass(frozen=True, slots=True)
class PlannedSettings:
    """How plans turn into spans; stored with a model.

    `variant` dense: the spans of a round see one another. `convention` shifted: in a span a token
    is predicted by the row before it, as in a model that began as an autoregressive one; aligned:
    by its own row. `unit`: a promise's number counts units of so many tokens. `max_positions`: the
    model's, for parsing; while decoding the recorder has it.
    """

    variant: Variant = "sparse"
    convention: Convention = "shifted"
    unit: int = 10
    max_positions: int | None = None

    def span(
        self, control: Mapping[str, int], number: int, length: int, position: int, topic: str
    ) -> Denoise:
        """The span of promise `number`, of `length` tokens, whose first one is at `position`."""
        return Denoise(
            child_name(number),
            length,
            position,
            dense=self.variant == "dense",
            mask=control[MASK],
            before=(control[ASYNC],),
            after=(control[ASYNC_END],),
            shifted=self.convention == "shifted",
            filler=control[PAD],
            topic=topic,
            role=SPAN_ROLE,
        )


@dataclass(frozen=True, slots=True)
class PlanCaps:
    """Where a plan is cut: promises in all, rounds, tokens of a span; `scale` multiplies these."""

    max_promises: int = 64
    max_rounds: int = 64
    max_span_tokens: int | None = None
    scale: float = 1.0

    def length(self, promised: int) -> int:
        """Tokens of the span of a promise of so many."""
        length = max(1, int(promised * self.scale + 0.5))
        return length if self.max_span_tokens is None else min(length, self.max_span_tokens)


class PlannedSession:
    """One request's state while it decodes; see `base.Session` for the contract.

    The scheduler sets `budget`, the tokens that the request may still draw: a span is paid for
    when it is created, and the first that does not fit is not, nor is any after it; the request
    then ends with "length". So it does where a plan would go on beyond one of its `caps`.
    """

    main_role = "plan"

    def __init__(
        self, masks: PlannedMasks, settings: PlannedSettings, caps: PlanCaps | None = None
    ) -> None:
        self.budget: Callable[[], int] = lambda: sys.maxsize
        self._masks = masks
        self._settings = settings
        self._caps = PlanCaps() if caps is None else caps
        self._vocabulary = masks.vocabulary
        self._control = masks.vocabulary.control
        self._reader = PromiseReader(masks.vocabulary)
        self._begun: TagPlace = (0, 0)
        self._promised: list[Tag] = []  # of the round under way
        self._num_promises = 0
        self._round = 1
        self._issues: list[tuple[str, TagPlace]] = []

    # -- base.Session --------------------------------------------------------------------------

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        self._check_main(thread)
        moves = [] if self._reader.accepts(token) else self._give_up_promise()
        if self._reader.accepts(token):
            return moves + self._read_promise(recorder, thread, token)
        if token == self._control[SYNC]:
            return moves + self._sync(recorder, thread, token)
        return [*moves, Place(token)]

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        if thread.parent is not None:
            return [Close(reason)]
        moves = self._give_up_promise()
        if reason != "stop":
            return [*moves, Close(reason)]
        spans, is_whole, _ = self._spans(recorder, thread)
        return [*moves, *spans, Close("stop" if is_whole else "length")]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return self._give_up_promise() if thread.parent is None else []

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]]:
        from stretto.dialects.planned_write import described

        ids = {s.handle: i for i, s in enumerate(recorder.document_order())}
        own = [(code, (ids.get(handle, -1), index)) for code, (handle, index) in self._issues]
        return described(recorder.freeze(), self._vocabulary, self._settings, own)

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        if thread.parent is not None:
            return self._masks.span
        if self._reader.count:
            return self._masks.in_promise(self._reader)
        return self._masks.next_promise if self._promised else self._masks.first_promise

    # -- internals -----------------------------------------------------------------------------

    def _check_main(self, thread: OpenThread) -> None:
        if thread.parent is not None:
            raise ValueError(f"thread {thread.name!r} is a span, which is not written in order")

    def _give_up_promise(self) -> list[Move]:
        """What was read of a promise is text after all."""
        count = self._reader.count
        if not count:
            return []
        self._issues.append(("unfinished-promise", self._begun))
        self._reader.reset()
        return [Reveal(count)]

    def _read_promise(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        reader = self._reader
        if not reader.count:
            if self._num_promises + len(self._promised) >= self._caps.max_promises:
                self._issues.append(("too-many-promises", next_place(thread)))
                return [*self._spans(recorder, thread)[0], Close("length")]
            self._begun = next_place(thread)
        if not reader.read(token):
            return [Place(token, markup=True, tentative=True)]
        self._promised.append(reader.tag(0, reader.count, self._settings.unit))
        reader.reset()
        return [Place(token, markup=True)]

    def _sync(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        is_last = self._round >= self._caps.max_rounds
        if is_last:
            self._issues.append(("too-many-rounds", next_place(thread)))
        self._round += 1
        spans, is_whole, position = self._spans(recorder, thread)
        close = [] if is_whole and not is_last else [Close("length")]
        if recorder.max_positions is not None and position >= recorder.max_positions:
            return [*spans, Close("length")]
        join = Join(tuple(move.child for move in spans if isinstance(move, Denoise)))
        return [*spans, join, Place(token, markup=True), *close]

    def _spans(self, recorder: Recorder, thread: OpenThread) -> tuple[list[Move], bool, int]:
        """The spans of the round's plan, and the wait for them; whether they are all of the plan's;
        the position after them."""
        position, left = thread.next_position, self.budget()
        limit = recorder.max_positions
        moves: list[Move] = []
        promised, self._promised = self._promised, []
        for tag in promised:
            length = self._caps.length(tag.length)
            after = position + length + 2
            if length > left or (limit is not None and after > limit):
                break
            self._num_promises += 1
            number = self._num_promises
            moves.append(self._settings.span(self._control, number, length, position, tag.topic))
            position, left = after, left - length
        is_whole = len(moves) == len(promised)
        if moves:
            moves.append(Wait(tuple(m.child for m in moves if isinstance(m, Denoise))))
        return moves, is_whole, position
