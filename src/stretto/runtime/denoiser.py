"""Writing a block: which of its tokens are drawn in a pass, from what, and which of them stay.

Every pass draws a value for each token that is not written yet, and keeps some of them: as many as
the schedule says, those of the best score (`select`), or all that are likely enough. Scores and
likelihoods are of the model's own distribution in float32, untempered, illegal ids removed;
temperature and filters change only what is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from stretto.dialects.base import Legal
from stretto.effects import Denoise
from stretto.params import SamplingParams
from stretto.recorder import OpenThread, Recorder
from stretto.runtime.chooser import Chooser
from stretto.runtime.quick import Doubles, Rows

CHUNK = 64
"""Rows whose distributions are in memory at once."""


def num_passes(length: int, steps_ratio: float) -> int:
    """The passes of a block of `length` tokens: ceil(r L), the ratio as it is written."""
    return max(1, math.ceil(Fraction(str(steps_ratio)) * length))


def num_written(length: int, passes: int, done: int) -> int:
    """Tokens that are written after `done` of so many passes: floor(i L / S)."""
    return done * length // passes


def select(
    scores: Doubles, likelihoods: Doubles, *, count: int, threshold: float | None = None
) -> list[int]:
    """Which of the tokens that were drawn stay, rising: the `count` of highest score or, with a
    threshold, all that are at least so likely; at least one. A tie goes to the first one, and what
    is no number comes last."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
    if threshold is None:
        return sorted(order[: max(1, count)].tolist())
    likely = np.flatnonzero(likelihoods >= threshold).tolist()
    return likely or order[:1].tolist()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a pass drew, one element a token that is not written yet."""

    tokens: list[int]
    logprobs: Doubles
    entropies: Doubles
    margins: Doubles
    """How much likelier the likeliest id is than the next one."""


@dataclass(slots=True, eq=False)
class Denoiser:
    """Writes one block. `left` are the places not written yet, among those to be written, rising;
    `logprobs` those of what was drawn, by the token's index in its segment, as it was drawn."""

    effect: Denoise
    params: SamplingParams
    left: list[int] = field(init=False)
    num_passes: int = 0
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

    def write(  # noqa: PLR0917
        self,
        recorder: Recorder,
        thread: OpenThread,
        chooser: Chooser,
        logits: Rows,
        legal: Legal | None,
        step: int,
    ) -> list[int]:
        """One pass: `logits` are those of `rows()`. The places that it has written, rising."""
        self.num_passes += 1
        thread.own.num_passes += 1
        drawn = self._draw(recorder, thread, chooser, logits, legal)
        kept = select(
            self._scores(drawn, chooser, thread),
            np.exp(drawn.logprobs),
            count=self._num_due(),
            threshold=self.params.threshold,
        )
        written = [self.left[i] for i in kept]
        for i, place in zip(kept, written, strict=True):
            index, token = len(self.effect.before) + place, drawn.tokens[i]
            self.logprobs[index] = float(drawn.logprobs[i])
            thread.num_drawn += 1
            is_filler = token == self.effect.filler
            recorder.rewrite(thread, index, token, origin="sampled", markup=is_filler, step=step)
        stays = set(written)
        self.left = [place for place in self.left if place not in stays]
        return sorted([*written, *self._finish_early(recorder, thread)])

    # -- internals -----------------------------------------------------------------------------

    def _num_due(self) -> int:
        length = self.effect.length
        passes = num_passes(length, self.params.steps_ratio)
        return num_written(length, passes, self.num_passes) - (length - len(self.left))

    def _scores(self, drawn: Drawn, chooser: Chooser, thread: OpenThread) -> Doubles:
        match self.params.order:
            case "entropy":
                return -drawn.entropies
            case "confidence":
                return drawn.logprobs
            case "margin":
                return drawn.margins
            case _:
                places = (self._counter(thread, place) for place in self.left)
                return np.array([chooser.number(thread.name, *p, "order") for p in places])

    def _counter(self, thread: OpenThread, place: int) -> tuple[int, int, int]:
        """What tells the draw of a place from the others of its thread: the token's number, the
        pass and the position."""
        position = thread.own.positions[len(self.effect.before) + place]
        return place, self.num_passes, position

    def _draw(
        self,
        recorder: Recorder,
        thread: OpenThread,
        chooser: Chooser,
        logits: Rows,
        legal: Legal | None,
    ) -> Drawn:
        is_legal = np.ones(logits.shape[1], dtype=np.bool_)
        if legal is not None:
            is_legal[:] = False
            is_legal[: len(legal.mask)] = legal.mask[: len(is_legal)]
        is_legal[self.effect.mask] = False
        parts = [
            self._draw_chunk(recorder, thread, chooser, logits, is_legal, start)
            for start in range(0, len(self.left), CHUNK)
        ]
        return Drawn(
            [token for part in parts for token in part.tokens],
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("logprobs", "entropies", "margins")
            ),
        )

    def _draw_chunk(  # noqa: PLR0917
        self,
        recorder: Recorder,
        thread: OpenThread,
        chooser: Chooser,
        logits: Rows,
        is_legal: NDArray[np.bool_],
        start: int,
    ) -> Drawn:
        places = self.left[start : start + CHUNK]
        rows = np.where(is_legal, logits[start : start + CHUNK], np.float32(-np.inf))
        tokens = []
        for place, row in zip(places, rows, strict=True):
            token = chooser.scripted(thread.name, place)
            if token is None or not is_legal[token]:
                counter = self._counter(thread, place)
                token = chooser.draw(recorder, thread, row, int(row.argmax()), counter)
            tokens.append(token)
        return measured(torch.from_numpy(rows), tokens)

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


def measured(rows: Float[Tensor, "places vocab"], tokens: list[int]) -> Drawn:
    """The figures of drawn tokens by their rows of logits, illegal ids at -inf, in float32."""
    logprobs = torch.log_softmax(rows, dim=-1)
    probabilities = logprobs.exp()
    entropies = torch.special.entr(probabilities).sum(dim=-1)
    two = probabilities.topk(min(2, rows.shape[1]), dim=-1).values
    own = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return Drawn(tokens, *(x.double().numpy() for x in (own, entropies, two[:, 0] - two[:, -1])))
