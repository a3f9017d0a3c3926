"""Dialect `pasta+tip`: a model that forks and forgets. The two dialects' effects, composed.

Registers belong to their thread: a child begins with none, and kills none of its parent's steps. A
step is all of its thread's segments from a register to before the next one, promises and `<sync/>`
included; killing it hides each of them, never a child that was joined. Positions are pasta's.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.dialects.base import Issue, Legal
from stretto.dialects.masks import mask_of
from stretto.dialects.pasta import PastaSession, PastaSettings
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.registers import BEFORE, IN_ANSWER, Steps, register_name
from stretto.dialects.tip import TipSettings
from stretto.effects import Move, Place
from stretto.recorder import OpenThread, Recorder


class PastaTipMasks:
    """The masks of pasta, and beside each under which text may be drawn, one with registers.

    All sessions of a model share one object. The vocabulary's size must not change any more.
    """

    def __init__(self, pasta: PastaMasks, num_registers: int) -> None:
        self.pasta = pasta
        vocabulary = pasta.vocabulary
        registers = [vocabulary.control[register_name(i)] for i in range(num_registers)]
        more = mask_of(vocabulary, registers)
        free = (pasta.main, pasta.main_full, pasta.child)
        self._with_registers = {id(legal): Legal(legal.mask | more) for legal in free}

    def with_registers(self, legal: Legal) -> Legal:
        """What is legal besides, where registers are; inside a promise they are not."""
        return self._with_registers.get(id(legal), legal)


class PastaTipSession:
    """One request's state while it decodes; see `base.Session` for the contract."""

    main_role = BEFORE

    def __init__(
        self, masks: PastaTipMasks, pasta: PastaSettings, tip: TipSettings, *, max_forks: int = 64
    ) -> None:
        self._masks = masks
        self._settings = pasta
        self._vocabulary = masks.pasta.vocabulary
        self._pasta = PastaSession(masks.pasta, pasta, max_forks=max_forks)
        self._steps = Steps(self._vocabulary, tip.num_registers, grace=tip.grace)
        self._misplaced: list[tuple[int, int]] = []

    @property
    def budget(self) -> Callable[[], int]:
        return self._pasta.budget

    @budget.setter
    def budget(self, budget: Callable[[], int]) -> None:
        self._pasta.budget = budget

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        if not self._steps.is_register(token):
            moves = self._pasta.feed(recorder, thread, token)
            is_text = moves[-1] == Place(token)
            return [*moves[:-1], *self._steps.write_text(thread, token)] if is_text else moves
        given_up = self._pasta.cut_off(recorder, thread)  # a promise under way is none after all
        if self._steps.admits(thread):
            return [*given_up, *self._steps.write(thread, token)]
        self._misplaced.append((thread.own.handle, len(thread.own.tokens)))
        return [*given_up, Place(token)]

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        return self._pasta.stopped(recorder, thread, reason)

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return self._pasta.cut_off(recorder, thread)

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]]:
        from stretto.dialects.pasta_text import in_order, to_text

        text, offsets = to_text(recorder.freeze(), self._vocabulary, self._settings)
        ids = {s.handle: i for i, s in enumerate(recorder.document_order())}
        places = [offsets[ids[handle], index] for handle, index in self._misplaced]
        misplaced = [Issue(IN_ANSWER, at) for at in places]
        return text, in_order([*self._pasta.placed_issues(recorder, offsets), *misplaced])

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        legal = self._pasta.legal(recorder, thread)
        return self._masks.with_registers(legal) if self._steps.admits(thread) else legal
