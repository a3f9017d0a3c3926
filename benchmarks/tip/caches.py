"""Ways to decode that hide other things than the model asks for: what the experiment controls.

- `besides_prompt`: a budget that leaves the prompt out, whatever its length is.
- `Oracle`: the problem's graph says when a step dies, not the model, which is a dense one.
- `remembering`: a model that writes registers, and none of them lets go of anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.data.registers import last_uses
from stretto.dialects.plain import PlainSession
from stretto.effects import Cut, Evict, Move
from stretto.eval.restricted import RestrictedLM, WrappedSession
from stretto.methods.spelling import evicting

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.params import SamplingParams
    from stretto.problems import Problem
    from stretto.recorder import OpenThread, Recorder
    from stretto.runtime.policy import Policy


@dataclass(frozen=True)
class Budgeted:
    """One of the methods that keep to a budget. `budget`: tokens; with `pin_prompt` those besides
    the prompt, which is kept whole."""

    rule: str
    budget: int
    pin_prompt: bool = False
    page_tokens: int = 1

    @property
    def label(self) -> str:
        """The arm, whatever the budget."""
        return f"{self.rule}{'+prompt' if self.pin_prompt else ''}"

    @property
    def name(self) -> str:
        return f"{self.label},budget={self.budget},page_tokens={self.page_tokens}"

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], PlainSession]:
        return lm.encode(prompt), PlainSession(lm.banned)

    def policy(
        self, num_prompt_tokens: int, params: SamplingParams, *, pool_page: int, sample: int
    ) -> Policy:
        budget = self.budget + num_prompt_tokens * self.pin_prompt
        settings = {"budget": budget, "page_tokens": self.page_tokens}
        method = evicting(self.rule, {**settings, "pin_prompt": self.pin_prompt})
        return method.policy(num_prompt_tokens, params, pool_page=pool_page, sample=sample)


# -- the graph decides -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Oracle:
    """Decodes sequentially, and lets go of each step of the solution after the last one that reads
    it, wherever the solution's steps begin: right as long as the model writes the solution."""

    problem: Problem
    name: str = "oracle"

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], PlainSession]:
        return lm.encode(prompt), PlainSession(lm.banned)

    def policy(
        self, num_prompt_tokens: int, params: SamplingParams, *, pool_page: int, sample: int
    ) -> Deaths:
        last = last_uses(self.problem.reads)
        starts = {num_prompt_tokens + start: k for k, (start, _) in enumerate(self.problem.spans)}
        dead = {k: [j for j in range(k) if last[j] < k] for k in range(len(last))}
        return Deaths(starts, dead)


@dataclass
class Deaths:
    """The policy: at the positions of `starts` a step begins, and by its number the steps of `dead`
    are no longer seen. One character of these problems is one token."""

    starts: Mapping[int, int]
    dead: Mapping[int, Sequence[int]]
    name: str = "oracle"
    wants_attention: bool = False
    is_reindexed: bool = False
    handles: dict[int, int] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)

    def cuts(self, num_prompt_tokens: int) -> list[int]:
        return []

    def act(
        self, recorder: Recorder, thread: OpenThread, attention: Mapping[int, float] | None
    ) -> list[Cut | Evict]:
        step = self.starts.get(thread.next_position)
        if step is None:
            return []
        moves: list[Cut | Evict] = []
        if thread.own.tokens:
            moves.append(Cut())
            if step:
                self.handles[step - 1] = thread.own.handle
        for number in self.dead[step]:
            if number not in self.hidden:
                self.hidden.add(number)
                moves.append(Evict(self.handles[number]))
        return moves


# -- nothing is let go of --------------------------------------------------------------------------


class Remembering(WrappedSession):
    """A session in which nothing is let go of."""

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        moves = super().feed(recorder, thread, token)
        return [move for move in moves if not isinstance(move, Evict)]


def remembering(lm: LM) -> LM:
    """The same model and pool; its registers are only words."""
    return RestrictedLM(lm, Remembering)
