"""What a run measures: a task's prompts, a baseline, and the arms that are held against it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stretto.eval.answers import Contestant
from stretto.eval.tasks import Item, Prompts, Task
from stretto.params import SamplingParams

BASELINE = ""
"""Stands for the baseline among names: an arm's is its folder's, so never empty."""

FIRST, EVERY = "first", "every"
WARM = (FIRST, EVERY)
"""When a side decodes a prompt untimed before it is timed: once in a process, or on every prompt,
as in the paper, where each request is decoded twice and the second one counts."""


@dataclass(frozen=True)
class Job:
    """`arms`: our sides by the names of their runs; each has rows of its own.

    `num_pairs`: timed decodes of each side and prompt; 0 times nothing, each side decodes once, and
    many prompts share each pass. `warm`: one of `WARM`.
    """

    task: Task
    prompts: Prompts
    arms: Mapping[str, Contestant]
    baseline: Contestant | None
    params: SamplingParams
    num_pairs: int = 1
    warm: str = FIRST
    keeps_prompts: bool = True

    def sides(self, arms: Collection[str]) -> dict[str, Contestant]:
        """These arms, in the job's order, and last the baseline, if there is one."""
        chosen = {name: arm for name, arm in self.arms.items() if name in arms}
        return chosen if self.baseline is None else {**chosen, BASELINE: self.baseline}


@dataclass(frozen=True)
class Question:
    """Prompt number `number` of a run, from 1 on, and the arms whose answer to it is missing."""

    number: int
    item: Item
    arms: tuple[str, ...]
