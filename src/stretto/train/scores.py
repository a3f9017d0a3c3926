"""Scores of sampled answers: how fast by structure, how good by a judge. Imports no torch.

PASTA scores a candidate by `speedup + lambda * quality` (thesis 3.4): its theoretical speedup over
the sequential baseline's answer, and what a judge says. The variants of the first term are those
of the paper's ablation, and `matched`; parallelism alone rewards branches that say the same thing
twice, and speedup alone, under a judge that is blind to what is left out, answers that say less.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from stretto.data.rows import Answer
from stretto.dialects.tags import ASYNC, ASYNC_END, PROMISE, PROMISE_END, SYNC, TOKENS
from stretto.errors import InvalidInput, UnknownName

VARIANTS = ("speedup", "parallelism", "harmonic", "arithmetic", "matched")

REDUNDANT_NGRAM = 3
REDUNDANT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Speed:
    """Counts that the speed of an answer follows from.

    `baseline_tokens`: tokens of the sequential baseline's answer to the prompt. `text_tokens`:
    tokens of this answer that are in its rendered text. `steps`: its critical path, the longest run
    of tokens drawn one after the other, control tokens included.
    """

    baseline_tokens: int
    text_tokens: int
    steps: int

    @property
    def speedup(self) -> float:
        """Baseline tokens a step; 0.0 without steps."""
        return self.baseline_tokens / self.steps if self.steps else 0.0

    @property
    def parallelism(self) -> float:
        """Own text tokens a step; 1 for a sequential answer without annotations."""
        return self.text_tokens / self.steps if self.steps else 0.0

    @property
    def harmonic(self) -> float:
        """Harmonic mean of the two; 0.0 if either is."""
        a, b = self.speedup, self.parallelism
        return 2 * a * b / (a + b) if a and b else 0.0

    @property
    def arithmetic(self) -> float:
        return (self.speedup + self.parallelism) / 2

    @property
    def matched(self) -> float:
        """The fewer of both answers' tokens, a step: 1 for a shorter sequential answer, so that
        nothing is gained by saying less, nor by saying more than the baseline."""
        return min(self.baseline_tokens, self.text_tokens) / self.steps if self.steps else 0.0

    def by(self, variant: str) -> float:
        """The figure called `variant`, one of `VARIANTS`. Raises `UnknownName`."""
        if variant not in VARIANTS:
            raise UnknownName("speed score", variant, list(VARIANTS))
        return float(getattr(self, variant))


def score(speed: float, quality: float | None, lam: float) -> float | None:
    """`speed + lam * quality`; `speed` alone for `lam` 0, `quality` alone for infinity.

    None if a quality is needed and there is none.
    """
    if lam == 0:
        return speed
    if quality is None:
        return None
    return quality if math.isinf(lam) else speed + lam * quality


def parse_lambda(text: str) -> float:
    """A lambda from 0 to infinity, "inf" being the latter. Raises `InvalidInput`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise InvalidInput(f"lambda must be a number from 0 on, or inf, got {text!r}")
    return value


def show_lambda(lam: float) -> str:
    """The shortest text that `parse_lambda` reads as `lam`: "4", "0.5", "inf"."""
    return f"{lam:g}" if float(f"{lam:g}") == lam else repr(lam)


# -- redundant branches ----------------------------------------------------------------------------


def redundant_branches(
    branches: Sequence[Sequence[Hashable]], *, ngram: int = REDUNDANT_NGRAM,
    share: float = REDUNDANT_SHARE,
) -> list[int]:  # fmt: skip
    """Indices of the branches that say nearly what an earlier sibling says.

    A branch (its text's tokens, in thread order) is redundant if at least `share` of its distinct
    runs of `ngram` tokens also stand in one earlier branch; of two equal ones the second is. A
    branch shorter than `ngram` is one run, equal only to the whole of another. An empty branch is
    redundant: it adds a thread and no text.
    """
    runs = [_runs(branch, ngram) for branch in branches]
    return [
        i
        for i, own in enumerate(runs)
        if not own or any(len(own & other) >= share * len(own) for other in runs[:i])
    ]


def _runs(tokens: Sequence[Hashable], size: int) -> set[tuple[Hashable, ...]]:
    if len(tokens) <= size:
        return {tuple(tokens)} if tokens else set()
    return {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}


def branches_of(ids: Sequence[int], control: Mapping[str, int]) -> list[list[int]]:
    """The text of each child of a pasta response, in promise order, without its tags.

    `ids` are in document order (`Answer.ids`), `control` is the model card's. A child that is not
    closed lasts until the next control token or the end.
    """
    opening, controls = control.get(ASYNC), set(control.values())
    branches: list[list[int]] = []
    inside = False
    for token in ids:
        if token in controls:
            inside = token == opening
            if inside:
                branches.append([])
        elif inside:
            branches[-1].append(token)
    return branches


# -- flaws -----------------------------------------------------------------------------------------


def flaws_of(answer: Answer, control: Mapping[str, int]) -> list[str]:
    """What keeps an answer from being a good example; empty for a whole, well-formed one.

    `cut`: it ended for another reason than its own end. `cut-branch`: a branch reached its cap, so
    its end was forced. `unclosed`: it was cut inside a branch, so that where the branch ends is not
    known. `malformed`: its control tokens do not follow the grammar. `empty`: no text.
    """
    flaws = []
    is_cut = answer.finish_reason != "stop"
    if is_cut:
        flaws.append("cut")
    if "f" in answer.origins:
        flaws.append("cut-branch")
    if (fault := grammar_fault(answer.ids, control, is_cut=is_cut)) is not None:
        flaws.append(fault)
    if not answer.text.strip():
        flaws.append("empty")
    return flaws


UNUSABLE = frozenset({"unclosed", "malformed"})
"""Flaws of answers that have no log-prob: who saw what in them is not known."""

_GRAMMAR: Mapping[str, Mapping[str, str]] = {
    "main": {PROMISE: "topic", SYNC: "main"},
    "topic": {TOKENS: "number"},
    "number": {PROMISE_END: "fork"},
    "fork": {ASYNC: "child"},
    "child": {ASYNC_END: "main"},
}


def grammar_fault(ids: Sequence[int], control: Mapping[str, int], *, is_cut: bool) -> str | None:
    """How the control tokens break `(PROMISE topic TOKENS number PROMISE_END ASYNC text ASYNC_END
    | SYNC | text)*` of dialect pasta: "malformed", "unclosed" (only where `is_cut`), or not at all.

    Topics and numbers are held to their rules by the sampler. Other dialects have no such grammar,
    so nothing breaks it.
    """
    if PROMISE not in control:
        return None
    names = {token: name for name, token in control.items()}
    state, num_text = "main", 0
    for token in ids:
        name = names.get(token)
        if name is None:
            num_text += 1
            if state == "fork":
                return "malformed"
            continue
        if name not in _GRAMMAR[state] or (state == "number" and not num_text):
            return "unclosed" if is_cut and state == "child" else "malformed"
        state, num_text = _GRAMMAR[state][name], 0
    if state == "main" or (is_cut and state in ("topic", "number")):
        return None
    return "unclosed" if is_cut else "malformed"
