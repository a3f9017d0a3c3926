"""Writing a block: which of its tokens are drawn in a pass, from what, and which of them stay.

A pass writes some of the tokens that are not written yet: as many as the schedule says, those of
the best score (`best`), or all whose drawn value is likely enough. Scores and likelihoods are of
the model's own distribution in float32, untempered, illegal ids removed; temperature and filters
change only what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.dialects.base import Legal
from stretto.effects import Denoise
from stretto.params import SamplingParams
from stretto.recorder import OpenThread, Recorder
from stretto.runtime.chooser import Chooser
from stretto.runtime.quick import Doubles, Row, Rows

CHUNK = 64
"""Rows whose probabilities are in memory at once."""


def scheduled_passes(length: int, steps_ratio: float) -> int:
    """The passes of a block of `length` tokens: ceil(r L), the ratio as it is written."""
    return max(1, math.ceil(Fraction(str(steps_ratio)) * length))


def num_written(length: int, passes: int, done: int) -> int:
    """Tokens that are written after `done` of so many passes: floor(i L / S)."""
    return done * length // passes


def best(scores: Doubles, count: int) -> list[int]:
    """The `count` places of highest score, one at least, rising. A tie goes to the first one, and
    what is no number comes last."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
    return sorted(order[: max(1, count)].tolist())


class Distributions:
    """The model's distributions over the legal ids, one a row of logits, in float32. Each figure
    is computed when it is asked for: some are much work for what few ways of writing read."""

    def __init__(self, logits: Rows, is_legal: NDArray[np.bool_]) -> None:
        self._logits = logits
        self._is_legal = is_legal

    def is_legal(self, token: int) -> bool:
        return bool(self._is_legal[token])

    def row(self, index: int) -> Row:
        """The logits of a row, -inf where an id is illegal."""
        return np.where(self._is_legal, self._logits[index], np.float32(-np.inf))

    def entropies(self) -> Doubles:
        """Of all rows, in nats."""
        return self._of_rows(range(len(self._logits)), _entropies)

    def margins(self) -> Doubles:
        """How much likelier the likeliest id is than the next one, of all rows."""
        return self._of_rows(range(len(self._logits)), _margins)

    def logprobs(self, tokens: Mapping[int, int]) -> Doubles:
        """Those of the legal ids that are given by row, in this order."""
        at = list(tokens)
        logits = self._logits[at, list(tokens.values())].astype(np.float64)
        return logits - self._of_rows(at, _log_sums)

    def _of_rows(self, at: Sequence[int], measure: Callable[[Tensor], Tensor]) -> Doubles:
        """A number a row, of a few rows at a time."""
        found = []
        for start in range(0, len(at), CHUNK):
            few = self._logits[list(at[start : start + CHUNK])]
            rows = torch.from_numpy(np.where(self._is_legal, few, np.float32(-np.inf)))
            found.append(measure(rows).double().numpy())
        return np.concatenate(found) if found else np.zeros(0)


def _log_sums(rows: Tensor) -> Tensor:
    """Logarithms of the sums of exponentials: float32 sums beside a peak, added in float64."""
    return rows.amax(dim=-1).double() - torch.log_softmax(rows, dim=-1).amax(dim=-1).double()


def _entropies(rows: Tensor) -> Tensor:
    entropies: Tensor = torch.special.entr(torch.softmax(rows, dim=-1)).sum(dim=-1)
    return entropies


def _margins(rows: Tensor) -> Tensor:
    two = torch.softmax(rows, dim=-1).topk(min(2, rows.shape[1]), dim=-1).values
    return two[:, 0] - two[:, -1]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of a block that a pass writes, and its log-probability."""

    token: int
    logprob: float


@dataclass(slots=True, eq=False)
class Denoiser:
    """Writes one block. `masked` are the places not written yet, rising; `logprobs` those of what
    was drawn, by the token's index in its segment, as it was drawn."""

    effect: Denoise
    params: SamplingParams
    chooser: Chooser
    masked: list[int] = field(init=False)
    logprobs: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.masked = list(range(self.effect.length))
        if self.effect.shifted and not self.effect.before:
            raise ValueError("no row of the block predicts its first token")

    @property
    def is_done(self) -> bool:
        return not self.masked

    def rows(self) -> tuple[int, ...]:
        """The rows of the block, from its first token, that predict what is not written yet."""
        first = len(self.effect.before) - int(self.effect.shifted)
        return tuple(first + place for place in self.masked)

    def draw(
        self, recorder: Recorder, thread: OpenThread, logits: Rows, legal: Legal | None
    ) -> dict[int, Drawn]:
        """What one pass writes, by place, rising; `logits` are those of `rows()`. Writes nothing
        yet, but counts the pass."""
        thread.own.num_passes += 1
        given = Distributions(logits, self._is_legal(legal, logits.shape[1]))
        tokens, logprobs = self._choose(recorder, thread, given)
        drawn = zip(tokens.items(), logprobs.tolist(), strict=True)
        return {self.masked[i]: Drawn(token, logprob) for (i, token), logprob in drawn}

    def write(
        self, recorder: Recorder, thread: OpenThread, drawn: Mapping[int, Drawn], *, step: int
    ) -> list[int]:
        """Writes what a pass has drawn. The places that it has written, rising."""
        for place, own in drawn.items():
            index = len(self.effect.before) + place
            self.logprobs[index] = own.logprob
            thread.num_drawn += 1
            recorder.rewrite(
                thread, index, own.token, origin="sampled", markup=self._fills(own.token), step=step
            )
        self.masked = [place for place in self.masked if place not in drawn]
        filled = self._finish_early(recorder, thread)
        if self.is_done:
            self._end_text(recorder, thread)
        return sorted([*drawn, *filled])

    # -- internals -----------------------------------------------------------------------------

    def _is_legal(self, legal: Legal | None, size: int) -> NDArray[np.bool_]:
        """Of each id, whether it may be written: no mask, and no stop id, which ends nothing that
        is not written in order."""
        is_legal = np.full(size, legal is None)
        if legal is not None:
            is_legal[: len(legal.mask)] = legal.mask[:size]
        is_legal[[self.effect.mask, *self.params.stop_ids]] = False
        return is_legal

    def _choose(
        self, recorder: Recorder, thread: OpenThread, given: Distributions
    ) -> tuple[dict[int, int], Doubles]:
        """What the pass writes: indices into `masked`, rising, each with a token, and the tokens'
        log-probabilities. Drawn are all tokens only where what they are decides which stay."""

        def draw(indices: Iterable[int]) -> dict[int, int]:
            return {i: self._draw(recorder, thread, given, i) for i in indices}

        threshold, order = self.params.threshold, self.params.order
        if threshold is None and order != "confidence":
            tokens = draw(best(self._scores(given, thread), self._num_due(thread)))
            return tokens, given.logprobs(tokens)
        tokens = draw(range(len(self.masked)))
        logprobs = given.logprobs(tokens)
        kept: list[int] = []
        if threshold is not None:
            kept = np.flatnonzero(np.exp(logprobs) >= threshold).tolist()
        if not kept:
            scores = logprobs if order == "confidence" else self._scores(given, thread)
            kept = best(scores, 1 if threshold is not None else self._num_due(thread))
        return {i: tokens[i] for i in kept}, logprobs[kept]

    def _num_due(self, thread: OpenThread) -> int:
        length = self.effect.length
        passes = scheduled_passes(length, self.params.steps_ratio)
        return num_written(length, passes, thread.own.num_passes) - (length - len(self.masked))

    def _scores(self, given: Distributions, thread: OpenThread) -> Doubles:
        """Of all that is masked, where what is drawn does not count; the best is written first."""
        match self.params.order:
            case "entropy":
                return -given.entropies()
            case "margin":
                return given.margins()
            case _:
                places = (self._counter(thread, place) for place in self.masked)
                return np.array([self.chooser.number(thread.name, *p, "order") for p in places])

    def _counter(self, thread: OpenThread, place: int) -> tuple[int, int, int]:
        """What tells the draw of a place from the others of its thread: the token's number, the
        pass and the position."""
        position = thread.own.positions[len(self.effect.before) + place]
        return place, thread.own.num_passes, position

    def _draw(
        self, recorder: Recorder, thread: OpenThread, given: Distributions, index: int
    ) -> int:
        place = self.masked[index]
        token = self.chooser.scripted(thread.name, place)
        if token is None or not given.is_legal(token):
            row, counter = given.row(index), self._counter(thread, place)
            token = self.chooser.draw(recorder, thread, row, int(row.argmax()), counter)
        return token

    def _fills(self, token: int) -> bool:
        """Whether a token is no text: a filler, or one that ends what is written."""
        return token == self.effect.filler or token in self.effect.ends

    def _end_text(self, recorder: Recorder, thread: OpenThread) -> None:
        """What stands behind the first of the ends is no text."""
        own, first = thread.own, len(self.effect.before)
        places = range(first, first + self.effect.length)
        end = next((i for i in places if own.tokens[i] in self.effect.ends), places.stop)
        for i in places[end + 1 - first :]:
            recorder.rewrite(
                thread, i, own.tokens[i], origin=own.origins[i], markup=True, step=own.steps[i]
            )

    def _finish_early(self, recorder: Recorder, thread: OpenThread) -> list[int]:
        """Where all before a filler or an end is written, what follows it is the same; the
        places."""
        if not (self.params.early_finish and self.masked):
            return []
        first = len(self.effect.before)
        written = thread.own.tokens[first : first + self.masked[0]]
        filler = next((token for token in written if self._fills(token)), None)
        if filler is None:
            return []
        filled, self.masked = self.masked, []
        for place in filled:
            recorder.rewrite(
                thread, first + place, filler, origin="injected", markup=True, step=None
            )
        return filled
