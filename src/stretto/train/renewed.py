"""Examples that are made anew in each epoch: promises that are now and then longer than need be.

What was promised too long is filled up with fillers, so a model sees other fillers, other lengths
and other positions of the same text in each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stretto.dialects.outline import Promised, outline
from stretto.dialects.tags import MAX_PROMISED_TOKENS, text_tags
from stretto.train.examples import Example, ExampleMaker
from stretto.train.lengths import with_length
from stretto.train.packing import Pack, PackedSteps, pack
from stretto.train.unusable import Unusable


@dataclass(frozen=True)
class Renewed:
    """Examples by turn. With `slack` p a promise is a unit longer than written with probability p,
    two with p², and so on; `maker` made the examples. One that would then not fit the model stays
    as it is. What is longer is packed as if it were not: a pack may then have more than its tokens,
    and an example more than a run's `max_tokens`, by so many units.
    """

    examples: Sequence[Example]
    maker: ExampleMaker | None = None
    slack: float = 0.0
    unit: int = 10

    def of_turn(self, turn: int, generator: torch.Generator) -> Example:
        """The example of a turn; its lengths are drawn from the generator."""
        example = self.examples[turn % len(self.examples)]
        if not self.slack or example.source is None or self.maker is None:
            return example
        prompt, text = example.source
        longer = lengthened(text, self.unit, lambda: _units(self.slack, generator))
        if longer == text:
            return example
        try:
            return self.maker.from_annotated(prompt, longer, example.key)
        except Unusable:
            return example


class Turns:
    """Steps whose groups are turns: the number of an example plus, for each epoch that is over, the
    number of examples. So each turn of an example has random numbers of its own."""

    def __init__(self, steps: PackedSteps, lengths: Sequence[int], pack_tokens: int) -> None:
        self._steps = steps
        self._lengths = lengths
        self._pack_tokens = pack_tokens
        self._turns: list[list[int]] = []
        done, count = 0, len(lengths)
        for step in range(steps.num_steps):
            groups = steps.groups(step)
            self._turns.append([done // count * count + group for group in groups])
            done += len(groups)

    @property
    def num_steps(self) -> int:
        return self._steps.num_steps

    def packs(self, step: int) -> list[Pack]:
        count = len(self._lengths)
        return pack(self._turns[step], lambda turn: self._lengths[turn % count], self._pack_tokens)


def lengthened(text: str, unit: int, draw: Callable[[], int]) -> str:
    """An annotated text whose promises are each longer by as many units as `draw` says."""
    parts, _ = outline(text_tags(text, unit), len(text))
    pieces, at = [], 0
    for part in parts:
        if not isinstance(part, Promised) or part.block is None or not (units := draw()):
            continue
        length = part.tag.length + units * unit
        if length <= MAX_PROMISED_TOKENS:
            pieces += [text[at : part.tag.start], with_length(part.tag, length)]
            at = part.tag.end
    return "".join([*pieces, text[at:]])


def _units(chance: float, generator: torch.Generator) -> int:
    """How many times in a row something of this chance happens."""
    units = 0
    while float(torch.rand((), generator=generator)) < chance:
        units += 1
    return units
