"""A method against plain decoding of the same weights, on the same engine and in one process."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Protocol

from stretto.methods import AUTO, Method
from stretto.params import METHOD_FIELDS, SamplingParams, check_int

if TYPE_CHECKING:
    from stretto.completion import Completion
    from stretto.lm import Prompt


class Answers(Protocol):
    """What answers prompts: an `LM`, or a stand-in that also shows what it does."""

    def generate(
        self, prompt: Prompt, params: SamplingParams, /, *, method: str | Method, raw: bool
    ) -> list[Completion]: ...


def compare(
    lm: Answers, prompt: Prompt, params: SamplingParams, *, method: str | Method = AUTO,
    raw: bool = False, pairs: int = 1,
) -> tuple[Completion, Completion]:  # fmt: skip
    """Answers a prompt by a method and by plain decoding of the same weights, alternating.

    Settings that plain decoding does not read are the method's alone. Both are run once unmeasured,
    then `pairs` times each, the other one first in every other pair.
    Returns the last completion of each; the method's has `theoretical` and `realized`, the latter
    the median over pairs.
    """
    check_int("pairs", pairs, 1)
    methods: tuple[str | Method, ...] = (method, "sequential")
    asked = params, params.without(METHOD_FIELDS)
    ratios = []
    for pair in range(pairs + 1):
        answers: dict[int, Completion] = {}
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            (answers[side],) = lm.generate(prompt, asked[side], method=methods[side], raw=raw)
        ours, baseline = answers[0], answers[1]
        ratios.append(_ratio(baseline.timing.decode_s, ours.timing.decode_s))
    baseline_tokens = sum(thread.num_tokens for thread in baseline.threads)
    theoretical = _ratio(baseline_tokens, ours.usage.sequential_steps)
    return ours.compared(theoretical, statistics.median(ratios[1:])), baseline


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
