"""Length-controlled win rates, after AlpacaEval 2 (Dubois et al., arXiv 2404.04475).

A logistic model says how likely run m's answer to prompt i is preferred over the baseline's:

    logit P(m, i) = model_m + length_m * tanh((len_ours - len_baseline) / std) + difficulty_i

with lengths in characters and std their difference's sample deviation over the run. The win rate at
equal length is the mean of P over prompts with the length difference at 0. Preferences may lie
between 0 and 1. It is fitted by Newton's method with a weak ridge, so that one who wins everywhere
has a rate below 100.

Two things differ from AlpacaEval's own command, which `stretto eval export` writes files for. Its
difficulties were fitted once to the models of its leaderboard, so they are for its 805 prompts
alone; here they are fitted to the runs compared, shrunk towards 0, and are 0 for a single run. And
it adds verdicts on deliberately long and short baselines to tame the length term; here the ridge
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.eval.statistics import NOTHING, Estimate, resampled

Floats = NDArray[np.float64]

RIDGE = 0.01
"""Weight of half the squared model and length terms, beside a log-likelihood of n prompts."""
DIFFICULTY_RIDGE = 1.0
"""The same of difficulties: each has a standard normal prior."""
NUM_RESAMPLES = 1000
NUM_ITERATIONS = 50
SMALLEST_STEP = 1e-9


@dataclass(frozen=True, eq=False)
class Judged:
    """A run's verdicts: of each prompt id, the preference for our answer (0 to 1) and how many
    characters longer than the baseline's it is."""

    preferences: Mapping[str, float]
    longer_chars: Mapping[str, int]

    @property
    def prompts(self) -> list[str]:
        return list(self.preferences)

    def lengths(self) -> Floats:
        """tanh of the standardised length differences, in the order of `prompts`; all 0 where they
        do not vary."""
        longer = np.array([self.longer_chars[p] for p in self.prompts], dtype=np.float64)
        spread = longer.std(ddof=1) if len(longer) > 1 else 0.0
        return np.tanh(longer / spread) if spread > 0 else np.zeros_like(longer)


def lc_win_rate(run: Judged, seed: int, difficulty: Mapping[str, float] | None = None) -> Estimate:
    """The length-controlled win rate in percent, with its interval over prompts, in which the
    difficulties are held. A model against itself has 50."""
    prompts = run.prompts
    if not prompts:
        return NOTHING
    wins = np.array([run.preferences[p] for p in prompts], dtype=np.float64)
    given = difficulty if difficulty is not None else {}
    hard = np.array([given.get(p, 0.0) for p in prompts], dtype=np.float64)
    lengths = run.lengths()

    def rate(chosen: NDArray[np.int64]) -> float:
        x, offset = lengths[chosen], hard[chosen]
        design = np.column_stack([np.ones(len(x)), x])
        model, _ = _fit(design, wins[chosen], offset, np.full(2, RIDGE))
        return 100 * float(_logistic(model + offset).mean())

    low, high = resampled(len(prompts), seed, rate, NUM_RESAMPLES)
    return Estimate(rate(np.arange(len(prompts))), low, high)


def difficulties(runs: Sequence[Judged]) -> dict[str, float]:
    """Of each prompt, how much more our answers to it are preferred than to others, over all runs
    against one baseline, model and length terms apart. Empty for fewer than two runs."""
    if len(runs) < 2:
        return {}
    prompts = list(dict.fromkeys(p for run in runs for p in run.prompts))
    index = {prompt: i for i, prompt in enumerate(prompts)}
    parts, wins = [], []
    for number, run in enumerate(runs):
        part = np.zeros((len(run.prompts), 2 * len(runs) + len(prompts)))
        part[:, 2 * number] = 1
        part[:, 2 * number + 1] = run.lengths()
        part[np.arange(len(part)), [2 * len(runs) + index[p] for p in run.prompts]] = 1
        parts.append(part)
        wins += list(run.preferences.values())
    design = np.concatenate(parts)
    ridge = np.full(design.shape[1], DIFFICULTY_RIDGE)
    ridge[: 2 * len(runs)] = RIDGE
    weights = _fit(design, np.array(wins, dtype=np.float64), np.zeros(len(design)), ridge)
    return dict(zip(prompts, weights[2 * len(runs) :].tolist(), strict=True))


def _fit(design: Floats, wins: Floats, offset: Floats, ridge: Floats) -> Floats:
    """The weights that minimise the cross-entropy of `wins` plus half of `ridge` times their
    squares: Newton's method, its steps halved while they do not help."""
    weights = np.zeros(design.shape[1])
    loss = _loss(design, wins, offset, ridge, weights)
    for _ in range(NUM_ITERATIONS):
        chance = _logistic(design @ weights + offset)
        slope = design.T @ (chance - wins) + ridge * weights
        curve = (design * (chance * (1 - chance))[:, None]).T @ design + np.diag(ridge)
        step = np.linalg.solve(curve, slope)
        scale = 1.0
        while (new := _loss(design, wins, offset, ridge, weights - scale * step)) > loss:
            scale /= 2
            if scale < SMALLEST_STEP:
                return weights
        weights, loss = weights - scale * step, new
        if np.abs(scale * step).max() < SMALLEST_STEP:
            break
    return weights


def _loss(design: Floats, wins: Floats, offset: Floats, ridge: Floats, weights: Floats) -> float:
    logits = design @ weights + offset
    entropy = np.logaddexp(0, logits) - wins * logits
    return float(entropy.sum() + 0.5 * (ridge * weights**2).sum())


def _logistic(x: Floats) -> Floats:
    return np.exp(-np.logaddexp(0, -x))
