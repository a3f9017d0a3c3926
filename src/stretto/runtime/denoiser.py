"""Writing a block: which of its tokens are drawn in a pass, from what, and which of them stay.

A pass writes some of the tokens that are not written yet: as many as the schedule says, those of
the best score (`select`), or all whose drawn value is likely enough. Scores and likelihoods are of
the model's own distribution in float32, untempered, illegal ids removed; temperature and filters
change only what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.dialects.base import Legal
from stretto.effects import Denoise
from stretto.params import SamplingParams
from stretto.recorder import OpenThread, Recorder
from stretto.runtime.chooser import Chooser
from stretto.runtime.quick import Doubles, Row, Rows

CHUNK = 64
"""Rows whose probabilities are in memory at once."""


def num_passes(length: int, steps_ratio: float) -> int:
    """The passes of a block of `length` tokens: ceil(r L), the ratio as it is written."""
    return max(1, math.ceil(Fraction(str(steps_ratio)) * length))


def num_written(length: int, passes: int, done: int) -> int:
    """Tokens that are written after `done` of so many passes: floor(i L / S)."""
    return done * length // passes


def select(
    scores: Doubles, likelihoods: Doubles, *, count: int, threshold: float | None = None
) -> list[int]:
    """Which places are written, rising: the `count` of highest score or, with a threshold, all
    that are at least so likely; at least one. A tie goes to the first one, and what is no number
    comes last."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
    if threshold is None:
        return sorted(order[: max(1, count)].tolist())
    likely = np.flatnonzero(likelihoods >= threshold).tolist()
    return likely or order[:1].tolist()


class Distributions:
    """The model's distributions over the legal ids, one a row of logits, in float32.

    `entropies` in nats; `margins`: how much likelier the likeliest id is than the next one.
    """

    def __init__(self, logits: Rows, is_legal: NDArray[np.bool_]) -> None:
        self._logits = logits
        self._is_legal = is_legal
        starts = range(0, len(logits), CHUNK)
        parts = [self._measure(logits[start : start + CHUNK]) for start in starts]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        self._peaks, self._log_sums, self.entropies, self.margins = columns

    def is_legal(self, token: int) -> bool:
        return bool(self._is_legal[token])

    def row(self, index: int) -> Row:
        """The logits of a row, -inf where an id is illegal."""
        return np.where(self._is_legal, self._logits[index], np.float32(-np.inf))

    def logprob(self, index: int, token: int) -> float:
        """That of a legal id in a row."""
        shifted = float(self._logits[index, token]) - float(self._peaks[index])
        return shifted - float(self._log_sums[index])

    def _measure(self, logits: Rows) -> tuple[Doubles, Doubles, Doubles, Doubles]:
        rows = torch.from_numpy(np.where(self._is_legal, logits, np.float32(-np.inf)))
        peaks = rows.amax(dim=-1)
        logprobs = torch.log_softmax(rows, dim=-1)
        log_sums = -logprobs.amax(dim=-1)
        probabilities = logprobs.exp()
        entropies = torch.special.entr(probabilities).sum(dim=-1)
        two = probabilities.topk(min(2, rows.shape[1]), dim=-1).values
        found = (peaks, log_sums, entropies, two[:, 0] - two[:, -1])
        first, second, third, fourth = (x.double().numpy() for x in found)
        return first, second, third, fourth


@dataclass(slots=True, eq=False)
class Denoiser:
    """Writes one block. `left` are the places not written yet, among those to be written, rising;
    `logprobs` those of what was drawn, by the token's index in its segment, as it was drawn."""

    effect: Denoise
    params: SamplingParams
    chooser: Chooser
    left: list[int] = field(init=False)
    logprobs: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = list(range(self.effect.length))
        if self.effect.shifted and not self.effect.before:
            raise ValueError("no row of the block predicts its first token")

    @property
    def is_done(self) -> bool:
        return not self.left

    def rows(self) -> tuple[int, ...]:
        """The rows of the block, from its first token, that predict what is not written yet."""
        first = len(self.effect.before) - int(self.effect.shifted)
        return tuple(first + place for place in self.left)

    def write(
        self,
        recorder: Recorder,
        thread: OpenThread,
        logits: Rows,
        legal: Legal | None,
        *,
        step: int,
    ) -> list[int]:
        """One pass: `logits` are those of `rows()`. The places that it has written, rising."""
        thread.own.num_passes += 1
        given = Distributions(logits, self._is_legal(legal, logits.shape[1]))
        tokens = self._choose(recorder, thread, given)
        written = [self.left[i] for i in tokens]
        for i, place in zip(tokens, written, strict=True):
            index, token = len(self.effect.before) + place, tokens[i]
            self.logprobs[index] = given.logprob(i, token)
            thread.num_drawn += 1
            is_filler = token == self.effect.filler
            recorder.rewrite(thread, index, token, origin="sampled", markup=is_filler, step=step)
        stays = set(written)
        self.left = [place for place in self.left if place not in stays]
        return sorted([*written, *self._finish_early(recorder, thread)])

    # -- internals -----------------------------------------------------------------------------

    def _is_legal(self, legal: Legal | None, size: int) -> NDArray[np.bool_]:
        """Of each id, whether it may be written; a mask may not."""
        is_legal = np.full(size, legal is None)
        if legal is not None:
            is_legal[: len(legal.mask)] = legal.mask[:size]
        is_legal[self.effect.mask] = False
        return is_legal

    def _choose(
        self, recorder: Recorder, thread: OpenThread, given: Distributions
    ) -> dict[int, int]:
        """What the pass writes: indices into `left`, rising, each with a token. Drawn are all
        tokens only where what they are decides which of them stay."""

        def draw(indices: Iterable[int]) -> dict[int, int]:
            return {i: self._draw(recorder, thread, given, i) for i in indices}

        tokens: dict[int, int] = {}
        logprobs = np.zeros(len(self.left))
        if self.params.threshold is not None or self.params.order == "confidence":
            tokens = draw(range(len(self.left)))
            logprobs = np.array([given.logprob(i, token) for i, token in tokens.items()])
        kept = select(
            self._scores(given, logprobs, thread),
            np.exp(logprobs),
            count=self._num_due(thread),
            threshold=self.params.threshold,
        )
        return {i: tokens[i] for i in kept} if tokens else draw(kept)

    def _num_due(self, thread: OpenThread) -> int:
        length = self.effect.length
        passes = num_passes(length, self.params.steps_ratio)
        return num_written(length, passes, thread.own.num_passes) - (length - len(self.left))

    def _scores(self, given: Distributions, logprobs: Doubles, thread: OpenThread) -> Doubles:
        match self.params.order:
            case "entropy":
                return -given.entropies
            case "confidence":
                return logprobs
            case "margin":
                return given.margins
            case _:
                places = (self._counter(thread, place) for place in self.left)
                return np.array([self.chooser.number(thread.name, *p, "order") for p in places])

    def _counter(self, thread: OpenThread, place: int) -> tuple[int, int, int]:
        """What tells the draw of a place from the others of its thread: the token's number, the
        pass and the position."""
        position = thread.own.positions[len(self.effect.before) + place]
        return place, thread.own.num_passes, position

    def _draw(
        self, recorder: Recorder, thread: OpenThread, given: Distributions, index: int
    ) -> int:
        place = self.left[index]
        token = self.chooser.scripted(thread.name, place)
        if token is None or not given.is_legal(token):
            row, counter = given.row(index), self._counter(thread, place)
            token = self.chooser.draw(recorder, thread, row, int(row.argmax()), counter)
        return token

    def _finish_early(self, recorder: Recorder, thread: OpenThread) -> list[int]:
        """Where all before a filler is written, what follows it is filler; the places."""
        first, filler = len(self.effect.before), self.effect.filler
        if not (self.params.early_finish and self.left) or filler is None:
            return []
        if filler not in thread.own.tokens[first : first + self.left[0]]:
            return []
        filled, self.left = self.left, []
        for place in filled:
            recorder.rewrite(
                thread, first + place, filler, origin="injected", markup=True, step=None
            )
        return filled
