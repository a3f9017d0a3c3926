"""A problem: a prompt, the steps of its solution, what each of them reads, and its right answer.

All tasks write with the symbols of `ALPHABET`, one character a token. What a step reads stands in
earlier steps alone: whoever cannot see those any more can only guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.data.labels import CutText, Labelled, Labels, label, register_tag
from stretto.errors import InvalidInput

NAMES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"
"""What steps are called: each name at most once in a problem."""
DIGITS = "0123456789"
OPERATORS = "+-*"
MARKS = "=:;?"
ALPHABET = NAMES + DIGITS + OPERATORS + MARKS
"""Every character of every prompt and response."""

_REGISTER = re.compile(r"<reg_(?:0|[1-9]\d*)>")


def without_registers(text: str) -> str:
    """An annotated text without its registers."""
    return _REGISTER.sub("", text)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a solution. `reads`: the earlier steps that it needs, in rising order; the one
    before it is always among them, since it says which line comes next. `fact`: what a later step
    may read of it, in its shortest form; empty where nothing does."""

    text: str
    reads: tuple[int, ...]
    fact: str = ""


@dataclass(frozen=True)
class Problem:
    """A problem and its solution. The last of `steps` gives the answer.

    `id`: task, size, split, seed and index, which make the problem what it is. `size`: the number
    of steps before the one that gives the answer.
    """

    id: str
    task: str
    size: int
    prompt: str
    steps: tuple[Step, ...]
    answer: str

    @property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The dependence graph: of each step the earlier steps that it reads."""
        return tuple(step.reads for step in self.steps)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each step, its register included."""
        return tuple(1 + len(step.text) for step in self.steps)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each step stands in the plain response, in characters."""
        ends, at = [], 0
        for step in self.steps:
            ends.append((at, at + len(step.text)))
            at += len(step.text)
        return tuple(ends)

    @property
    def cut(self) -> CutText:
        """The solution and its graph, as they are labelled."""
        texts, facts = (tuple(getattr(step, n) for step in self.steps) for n in ("text", "fact"))
        return CutText(texts, self.reads, facts=facts)

    def labelled(self, labels: Labels) -> Labelled | None:
        """The solution with registers; None if its steps cannot be made to fit them."""
        return label(self.cut, labels, len, self.id)

    def response(self, registers: Sequence[int] | None = None) -> str:
        """The solution; with one register a step, annotated. Raises `InvalidInput` for another
        number of registers."""
        if registers is None:
            return "".join(step.text for step in self.steps)
        if len(registers) != len(self.steps):
            raise InvalidInput(
                f"{len(registers)} registers for {len(self.steps)} steps; give one a step, that of "
                "the answer included"
            )
        pairs = zip(registers, self.steps, strict=True)
        return "".join(register_tag(register) + step.text for register, step in pairs)

    def check(self, text: str) -> bool:
        """Whether a response, annotated or not, ends with a right answer, however it got there."""
        from stretto.problems.draw import is_right

        return is_right(self, without_registers(text).strip())

    def first_wrong(self, text: str) -> int | None:
        """The first step of a response that is not the solution's, or None if all are.

        A response that goes on after the answer is wrong at `len(steps)`. Responses that restate
        facts (spilled ones) are wrong where they do so.
        """
        text = without_registers(text).strip()
        for number, (step, (start, end)) in enumerate(zip(self.steps, self.spans, strict=True)):
            if text[start:end] != step.text:
                return number
        return None if len(text) == self.spans[-1][1] else len(self.steps)
