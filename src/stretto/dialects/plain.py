"""Dialect `plain`: no annotations. One thread, one causal segment after the prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stretto.dialects.base import Legal, Parsed, Vocabulary
from stretto.effects import Close, Move, Place
from stretto.recorder import MAIN, OpenThread, Recorder


class PlainSession:
    """Places every token as text. `banned[id]` ids (a model's control tokens) are never drawn."""

    main_role = "main"

    def __init__(self, banned: NDArray[np.bool_] | None = None) -> None:
        self.budget: Callable[[], int] = lambda: 0
        self._legal = None if banned is None else Legal(~banned)

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        return [Place(token)]

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        return [Close(reason)]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return []

    def annotated(self, recorder: Recorder) -> None:
        return None

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal | None:
        return self._legal


def parse_text(text: str, vocabulary: Vocabulary, prompt: str = "") -> Parsed:
    """The trace of a text without annotations: one causal segment that sees the prompt."""
    recorder = Recorder(vocabulary.encode(prompt), PlainSession.main_role)
    main = recorder.threads[MAIN]
    for token in vocabulary.encode(text):
        recorder.place(main, Place(token))
    return Parsed(recorder.freeze(), text, ())
