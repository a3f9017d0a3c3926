"""What a run measures: a task's prompts, a baseline, and the arms that are held against it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stretto.errors import InvalidInput
from stretto.eval.answers import Contestant
from stretto.eval.tasks import Item, Prompts, Task
from stretto.params import SamplingParams

BASELINE = ""
"""Stands for the baseline among names: an arm's is its folder's, so never empty."""

FIRST, EVERY = "first", "every"
WARM = (FIRST, EVERY)
"""When a side decodes a prompt untimed before it is timed: once in a process, or on every prompt,
as in the paper, where each request is decoded twice and the second one counts."""
AT_ONCE = 16
"""Requests of a side under way: as many long answers as the usual pool has room for."""


@dataclass(frozen=True)
class Job:
    """`arms`: our sides by the names of their runs; each has rows of its own.

    `num_samples`: answers of each side to each prompt. `num_pairs`: timed decodes of each side and
    answer; 0 times nothing, each side decodes once, and `batch` requests of a side share each pass.
    `warm`: one of `WARM`. Raises `InvalidInput` for several samples of which all would be the same.
    """

    task: Task
    prompts: Prompts
    arms: Mapping[str, Contestant]
    baseline: Contestant | None
    params: SamplingParams
    num_samples: int = 1
    num_pairs: int = 1
    warm: str = FIRST
    keeps_prompts: bool = True
    batch: int = AT_ONCE

    def __post_init__(self) -> None:
        if self.num_samples > 1 and self.params.temperature == 0:
            raise InvalidInput(
                f"at temperature 0 all {self.num_samples} samples of a prompt are one; give "
                "--temperature, or leave out --n"
            )

    def sides(self, arms: Collection[str]) -> dict[str, Contestant]:
        """These arms, in the job's order, and last the baseline, if there is one."""
        chosen = {name: arm for name, arm in self.arms.items() if name in arms}
        return chosen if self.baseline is None else {**chosen, BASELINE: self.baseline}


@dataclass(frozen=True)
class Question:
    """Sample number `sample` of prompt number `number` of a run, from 1 on, and the arms whose
    answer to it is missing."""

    number: int
    item: Item
    arms: tuple[str, ...]
    sample: int = 0
