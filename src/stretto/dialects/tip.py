"""Dialect `tip`: a step of thought is forgotten when its register is written again.

Thinking in Place (T. Jin, PhD thesis, arXiv 2609.14850, chapter 4). `<reg_r>` begins a step; the
earlier step that register r held is no longer seen by anything that comes after. The prompt, text
before the first register, and the answer after the end of reasoning stay. What has seen a step
keeps what it took from it: nothing is computed again, and positions never change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.dialects.base import Issue, Legal, Vocabulary
from stretto.dialects.masks import mask_of, text_ids
from stretto.dialects.registers import (
    BEFORE,
    DEFAULT_REGISTERS,
    IN_ANSWER,
    Steps,
    register_name,
)
from stretto.effects import Close, Move, Place
from stretto.recorder import OpenThread, Recorder


@dataclass(frozen=True, slots=True)
class TipSettings:
    """Stored with a model. `grace`: a register still sees the step that it kills.

    `max_positions`: the model's, for parsing; while decoding the recorder has it.
    """

    num_registers: int = DEFAULT_REGISTERS
    grace: bool = False
    max_positions: int | None = None


class TipMasks:
    """Masks over a vocabulary's ids; all sessions of a model share one object.

    Text and ends of sequence are legal everywhere, registers while `thinking`. Ids without text
    are legal only if they end a sequence. The vocabulary must not grow any more.
    """

    def __init__(self, vocabulary: Vocabulary, num_registers: int) -> None:
        self.vocabulary = vocabulary
        going_on = [*text_ids(vocabulary), *vocabulary.end_ids]
        registers = [vocabulary.control[register_name(i)] for i in range(num_registers)]
        self.answering = Legal(mask_of(vocabulary, going_on))
        self.thinking = Legal(mask_of(vocabulary, [*going_on, *registers]))


class TipSession:
    """One request's state while it decodes; see `base.Session` for the contract."""

    main_role = BEFORE

    def __init__(self, masks: TipMasks, settings: TipSettings) -> None:
        self.budget: Callable[[], int] = lambda: sys.maxsize
        self._masks = masks
        self._steps = Steps(masks.vocabulary, settings.num_registers, grace=settings.grace)
        self._misplaced: list[tuple[int, int]] = []

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        if not self._steps.is_register(token):
            return self._steps.write_text(thread, token)
        if self._steps.admits(thread):
            return self._steps.write(thread, token)
        self._misplaced.append((thread.own.handle, len(thread.own.tokens)))
        return [Place(token)]

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        return [Close(reason)]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return []

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]]:
        from stretto.dialects.tip_text import to_text

        text, offsets = to_text(recorder.freeze(), self._masks.vocabulary)
        ids = {s.handle: i for i, s in enumerate(recorder.document_order())}
        places = [offsets[ids[handle], index] for handle, index in self._misplaced]
        return text, tuple(Issue(IN_ANSWER, at) for at in places)

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        masks = self._masks
        return masks.thinking if self._steps.admits(thread) else masks.answering


def death_vector(
    ids: Sequence[int],
    registers: Sequence[int],
    *,
    num_prompt: int = 0,
    reasoning_end: int | None = None,
    grace: bool = False,
) -> list[int]:
    """When each token of a sequence is forgotten: token `q` sees `k` iff `k <= q < deaths[k]`.

    `registers` are the ids of `<reg_0>`, `<reg_1>`, …; the first `num_prompt` ids are a prompt, in
    which they mean nothing, as after a first `reasoning_end`. What never dies has `len(ids)`. One
    scan from the end, in O(T); `stretto.trace.deaths` says the same of a trace.
    """
    number = {token: i for i, token in enumerate(registers)}
    end = next((p for p in range(num_prompt, len(ids)) if ids[p] == reasoning_end), len(ids))
    deaths = [len(ids)] * len(ids)
    written: dict[int, int] = {}  # where each register is next written
    step_end = min(end + 1, len(ids))
    for p in range(step_end - 1, num_prompt - 1, -1):
        register = number.get(ids[p])
        if register is None:
            continue
        death = written.get(register)
        if death is not None:
            deaths[p:step_end] = [min(death + grace, len(ids))] * (step_end - p)
        written[register] = step_end = p
    return deaths
