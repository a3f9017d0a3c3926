"""Problems of lines: each names a value that is computed from earlier ones, modulo 7.

A line is `c=a+b` in the prompt and `c=a+b:5` in the solution. Constants (digits) stand in the lines
themselves. Every operation is one-to-one in each value that it reads, and operations are redrawn
until no value cancels on its way to the answer (`lasting`), so a wrong one does not heal: it makes
the answer wrong, but where several wrong ones happen to make up for each other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.problems.base import NAMES, Problem, Step

MODULUS = 7
MAX_DRAWS = 100


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier line."""

    line: int


Operand = Ref | int


@dataclass(frozen=True, slots=True)
class Line:
    """`left operator right`; a product has at most one reference, and no constant that is 0."""

    left: Operand
    operator: str
    right: Operand

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(o.line for o in (self.left, self.right) if isinstance(o, Ref))


@dataclass(frozen=True)
class Sketch:
    """A problem without names: its lines in order, and which of them is asked for."""

    lines: tuple[Line, ...]
    asked: int

    def values(self) -> list[int]:
        values: list[int] = []
        for line in self.lines:
            left, right = (o if isinstance(o, int) else values[o.line] for o in _operands(line))
            values.append(_apply(left, line.operator, right))
        return values

    def canonical(self) -> str:
        """The prompt under fixed names: two problems that differ in names alone have the same."""
        return "/".join((*self._written(NAMES), str(self.asked)))

    def named(self, rng: random.Random, name: str, task: str) -> Problem:
        """The problem under names drawn at random."""
        names = rng.sample(NAMES, len(self.lines))
        written, values = self._written(names), self.values()
        steps = [
            Step(
                f"{text}:{value}",
                tuple(sorted({*line.reads, *([k - 1] if k else [])})),
                f"{names[k]}:{value}",
            )
            for k, (text, line, value) in enumerate(zip(written, self.lines, values, strict=True))
        ]
        asked, last = names[self.asked], len(self.lines) - 1
        answer = str(values[self.asked])
        steps.append(Step(f"?{asked}:{answer}", tuple(sorted({self.asked, last}))))
        prompt = f"{''.join(written)}?{asked}"
        return Problem(name, task, len(self.lines), prompt, tuple(steps), answer)

    def _written(self, names: Sequence[str]) -> list[str]:
        def write(operand: Operand) -> str:
            return str(operand) if isinstance(operand, int) else names[operand.line]

        return [
            f"{names[k]}={write(line.left)}{line.operator}{write(line.right)}"
            for k, line in enumerate(self.lines)
        ]


def _operands(line: Line) -> tuple[Operand, Operand]:
    return line.left, line.right


def _apply(left: int, operator: str, right: int) -> int:
    match operator:
        case "+":
            return (left + right) % MODULUS
        case "-":
            return (left - right) % MODULUS
    return left * right % MODULUS


# -- lines drawn at random -------------------------------------------------------------------------


def constant_line(rng: random.Random) -> Line:
    """Two constants: what it comes to is in no prompt."""
    operator = rng.choice("+-*")
    return Line(rng.randint(1, MODULUS - 1), operator, rng.randint(1, MODULUS - 1))


def unary_line(rng: random.Random, line: int) -> Line:
    """An earlier value changed by a constant; never left as it was."""
    operator = rng.choice("+-*")
    return Line(Ref(line), operator, rng.randint(2 if operator == "*" else 1, MODULUS - 1))


def binary_line(rng: random.Random, left: int, right: int) -> Line:
    """The sum or difference of two different earlier values."""
    return Line(Ref(left), rng.choice("+-"), Ref(right))


def weights(sketch: Sketch) -> list[int | None]:
    """How much the answer changes, modulo 7, if a line's value is one more; None for a line that
    does not lead to it. Lines are linear in what they read."""
    found: list[int | None] = [None] * len(sketch.lines)
    found[sketch.asked] = 1
    for k in range(sketch.asked, -1, -1):
        weight, line = found[k], sketch.lines[k]
        if weight is None:
            continue
        for operand, other, sign in ((line.left, line.right, 1), (line.right, line.left, -1)):
            if isinstance(operand, Ref):
                factor = {"+": 1, "-": sign, "*": other if isinstance(other, int) else 0}
                before = found[operand.line] or 0
                found[operand.line] = (before + weight * factor[line.operator]) % MODULUS
    return found


def lasting(rng: random.Random, sketch: Sketch) -> Sketch:
    """The same graph with operations that let no value cancel on its way to the answer; of
    `MAX_DRAWS` draws the one in which the fewest do."""
    best, fewest = sketch, weights(sketch).count(0)
    for _ in range(MAX_DRAWS):
        if fewest == 0:
            break
        drawn = Sketch(tuple(_redrawn(rng, line) for line in sketch.lines), sketch.asked)
        if (lost := weights(drawn).count(0)) < fewest:
            best, fewest = drawn, lost
    return best


def _redrawn(rng: random.Random, line: Line) -> Line:
    match line.reads:
        case (left, right):
            return binary_line(rng, left, right)
        case (left,):
            return unary_line(rng, left)
    return line


def is_right(problem: Problem, text: str) -> bool:
    """Whether a text ends with the value asked for, and says that it is what was asked for."""
    return text.endswith(f"{problem.prompt[-2:]}:{problem.answer}")
