"""Dialect `masked`: models of masked diffusion that others have trained, run as they are.

LLaDA (Nie et al., arXiv 2502.09992) and Dream (Ye et al., arXiv 2508.15487) are such. They write no
annotations and have one control token, the mask. Prompt and answer see each other in both
directions, so an answer is one block: the prompt, and behind it a window of masks, as long as the
request may draw tokens. What is written ends at the window's first end of sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from stretto.dialects.base import Legal, Vocabulary
from stretto.dialects.masks import mask_of
from stretto.effects import Close, Denoise, Evict, Move, Resume, Wait
from stretto.errors import Unsupported
from stretto.recorder import MAIN, OpenThread, Recorder

MASK: Final = "mask"
MASKED_FORMS: Mapping[str, str] = {MASK: "[MASK]"}
"""The name of the control token and its text form."""

ANSWER: Final = f"{MAIN}.1"
"""The thread of the block."""


class MaskedRules:
    """What all sessions of a model share: the mask, which ids end an answer, what may be drawn.

    `shifted`: a token is predicted by the row before it, the answer's first one by the prompt's
    last; else by its own. Raises `Unsupported` for a vocabulary without an end of sequence.
    """

    def __init__(self, vocabulary: Vocabulary, *, shifted: bool) -> None:
        if not vocabulary.end_ids:
            raise Unsupported(
                "the model has no end of sequence, which fills its windows; name one in its "
                "generation_config.json"
            )
        self.mask = vocabulary.control[MASK]
        self.shifted = shifted
        self.ends = vocabulary.end_ids
        self.end = Legal(mask_of(vocabulary, vocabulary.end_ids))
        banned = mask_of(vocabulary, [*vocabulary.control.values(), *vocabulary.spare_ids])
        self.answer = Legal(np.logical_not(banned))

    def block(self, prompt: list[int], length: int) -> Denoise:
        """The prompt, and behind it a window of so many tokens."""
        return Denoise(
            ANSWER,
            length,
            position=0,
            mask=self.mask,
            before=tuple(prompt),
            shifted=self.shifted,
            ends=self.ends,
            role="answer",
        )


class MaskedSession:
    """One request's state; see `dialects.base.ResumingSession` for the contract.

    Main reads the prompt in order, and draws the end. What it has read is then hidden: the block
    reads the prompt anew, in each pass, as the model was trained to.
    """

    main_role = "main"

    def __init__(self, rules: MaskedRules) -> None:
        self.budget: Callable[[], int] = lambda: sys.maxsize
        self._rules = rules

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        raise ValueError(f"thread {thread.name!r} draws token {token}; it may only end")

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        if thread.parent is not None or reason != "stop":
            return [Close(reason)]
        prompt = [t for handle in thread.segments for t in recorder.segments[handle].tokens]
        length = self.budget()
        if recorder.max_positions is not None:
            length = min(length, recorder.max_positions - len(prompt))
        if length < 1:
            return [Close("length")]
        hidden = [Evict(handle) for handle in thread.sees]
        return [*hidden, self._rules.block(prompt, length), Wait((ANSWER,)), Resume()]

    def resumed(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        """The window is full: it ends where there is an end in it, else for want of room."""
        own = recorder.threads[ANSWER].own
        drawn = (t for t, step in zip(own.tokens, own.steps, strict=True) if step is not None)
        is_ended = any(token in self._rules.ends for token in drawn)
        return [Close("stop" if is_ended else "length")]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return []

    def annotated(self, recorder: Recorder) -> None:
        return None

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        return self._rules.end if thread.parent is None else self._rules.answer
