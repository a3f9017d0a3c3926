"""What a thread draws next: the automaton's mask, the penalty, the random number, the log-prob."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import numpy as np
import torch

from stretto.dialects.base import Legal
from stretto.params import SamplingParams
from stretto.recorder import OpenSegment, OpenThread, Recorder
from stretto.runtime.peak import peak
from stretto.runtime.quick import Ids, Row, quick_draw
from stretto.runtime.sampler import Sampling, draw, penalised, uniform

Script = Callable[[str, int], int | None]
"""Forced output: (thread, index of its next drawn token) -> token id, or None to draw it."""


class Chooser:
    """Draws one request's tokens. A draw depends on its own row and counter, on nothing else.

    Rows are taken one by one: a row fits the processor's cache where a batch of them does not,
    and which mask a thread is under may depend on what the thread before it has just drawn.
    """

    def __init__(self, params: SamplingParams, sample: int, script: Script | None) -> None:
        self._seed = params.seed
        self._sample = sample
        self._script = script
        self._sampling = Sampling(
            params.temperature, params.top_k, params.top_p, params.repetition_penalty
        )
        self._seen: dict[str, SeenIds] = {}
        self._masks: WeakKeyDictionary[Legal, tuple[Ids, bool]] = WeakKeyDictionary()

    def choose(
        self, recorder: Recorder, thread: OpenThread, logits: Row, legal: Legal | None
    ) -> tuple[int, float]:
        """A token and its log-probability at temperature 1 under the automaton's mask."""
        if legal is not None:
            logits = self._masked(logits, legal)
        best, best_logprob = peak(logits)
        token = None
        if not (legal is not None and legal.forced):
            token = self.scripted(thread.name, thread.num_drawn)
        if token is None:
            token = self.draw(recorder, thread, logits, best, (thread.num_drawn,))
        return token, float(logits[token]) - float(logits[best]) + best_logprob

    def scripted(self, thread: str, index: int) -> int | None:
        """The token that is forced there, if there is a script."""
        return None if self._script is None else self._script(thread, index)

    def number(self, thread: str, *counter: int | str) -> float:
        """The random number of this request's draw of that counter."""
        return uniform(self._seed, self._sample, thread, *counter)

    def draw(
        self,
        recorder: Recorder,
        thread: OpenThread,
        logits: Row,
        best: int,
        counter: tuple[int, ...],
    ) -> int:
        """A token by the row of its logits, illegal ones at -inf; `best` is the largest's id."""
        sampling, seen, row = self._sampling, None, logits
        if sampling.repetition_penalty != 1.0:
            seen = self._seen.setdefault(thread.name, SeenIds()).of(recorder, thread)
            row = penalised(torch.from_numpy(logits), sampling.repetition_penalty, seen).numpy()
            best = int(row.argmax())
        number = 0.0
        if sampling.temperature != 0:
            number = self.number(thread.name, *counter)
        token = quick_draw(row, best, sampling, number)
        return draw(torch.from_numpy(logits), sampling, number, seen) if token is None else token

    def _masked(self, logits: Row, legal: Legal) -> Row:
        """A copy with -inf where a token is illegal, written in as few places as it takes."""
        known = self._masks.get(legal)
        if known is None:
            is_legal = np.zeros(len(logits), dtype=np.bool_)
            is_legal[: len(legal.mask)] = legal.mask[: len(logits)]
            few_legal = 2 * int(is_legal.sum()) < len(is_legal)
            known = np.flatnonzero(is_legal if few_legal else ~is_legal), few_legal
            self._masks[legal] = known
        ids, few_legal = known
        if not few_legal:
            row = logits.copy()
            row[ids] = -np.inf
            return row
        row = np.full_like(logits, -np.inf)
        row[ids] = logits[ids]
        return row


class SeenIds:
    """Ids of the response's text visible to a thread: what its repetition penalty is about. That
    an annotation was written is no reason to write no further one. Brought forward by what the
    thread has placed, and gathered anew when its view has changed or what was held to be markup is
    text after all, or in a block with every pass, which writes in what is seen."""

    def __init__(self) -> None:
        self._view: tuple[int, int, int, int] | None = None
        self._ids: set[int] = set()
        self._num_own = 0

    def of(self, recorder: Recorder, thread: OpenThread) -> set[int]:
        own = thread.own
        view = thread.bits, own.handle, own.num_passes, recorder.num_revealed
        if view != self._view:
            self._view, self._num_own = view, 0
            segments = [recorder.segments[handle] for handle in thread.sees]
            self._ids = {i for s in segments for i in _text(s, 0)}
        self._ids.update(_text(own, self._num_own))
        self._num_own = len(own.tokens)
        return self._ids


def _text(segment: OpenSegment, start: int) -> Iterator[int]:
    """The text of a segment of the response from an index on; of a prompt none."""
    if segment.origins[:1] == ["prompt"]:
        return
    for token, markup in zip(segment.tokens[start:], segment.markup[start:], strict=True):
        if not markup:
            yield token
