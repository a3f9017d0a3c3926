"""Budgets of visible tokens that come to a given mean: what a policy must be given to hold as much
as another method does.

With pages of one token a row of a policy with budget B sees exactly min(dense, B) tokens. Over T
tokens after a prompt of P its mean is so B - (B-P)(B-P-1) / 2T for P < B <= P + T. Here the sums
are exact, for any B.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Length:
    """An answer of `tokens` after a prompt of `prompt`, of which a policy always keeps `held`."""

    prompt: int
    tokens: int
    held: int = 0


def mean_live(budget: int, length: Length, *, generated: bool = False) -> float:
    """The mean, over an answer's tokens, of the tokens that each sees within a budget.

    With `generated` those of the prompt are left out, as in a window, which drops the prompt first
    but for the `held` tokens of it: row i (from 0) sees min(i + 1, B - held) of the answer. Else it
    is min(prompt + i + 1, B). 0 for an empty answer.
    """
    before, most = (0, budget - length.held) if generated else (length.prompt, budget)
    num_growing = min(length.tokens, max(0, most - before))
    growing = num_growing * before + num_growing * (num_growing + 1) // 2
    full = (length.tokens - num_growing) * max(0, most)
    return (growing + full) / length.tokens if length.tokens else 0.0


def budget_for(target: float, lengths: Sequence[Length], *, generated: bool = False) -> int:
    """The budget whose mean over answers of `mean_live` is nearest to `target`, the smaller of two.

    Raises `InvalidInput` for no answers, and for a target above what is seen with nothing hidden.
    """
    filled = [length for length in lengths if length.tokens]
    if not filled:
        raise InvalidInput("there is no answer with tokens to find a budget for; give others")

    def mean(budget: int) -> float:
        return sum(mean_live(budget, n, generated=generated) for n in filled) / len(filled)

    most = max(n.prompt + n.held + n.tokens for n in filled)
    if target > mean(most) + 1e-9:
        raise InvalidInput(
            f"no budget holds {target:.1f} tokens on average: with nothing hidden it is "
            f"{mean(most):.1f}; use method dense"
        )
    at = max(1, bisect.bisect_left(range(most + 1), target, key=mean))
    return at - 1 if at > 1 and target - mean(at - 1) <= mean(at) - target else at
