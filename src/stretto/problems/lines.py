"""Problems of lines: each names a sum or difference of earlier values, modulo 5.

The prompt has the lines in the order in which they can be worked out, `a+b=c;`, and ends with what
is asked for, `?c`. The solution follows it, `a1+b2=c3`, and ends with `?c3`. Constants (digits)
stand in the lines themselves. Every operation is one-to-one in each value that it reads, and
operations are redrawn until no value cancels on its way to the answer (`lasting`), so a wrong one
does not heal: it makes the answer wrong, but where several wrong ones happen to make up for each
other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.problems.base import NAMES, Problem, Step

MODULUS = 5
"""Small, and without products: a tiny model learns what it is to remember before it has learnt the
tables of a larger one."""
MAX_DRAWS = 100


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier line."""

    line: int


Operand = Ref | int


@dataclass(frozen=True, slots=True)
class Line:
    """`left operator right`. No constant is 0."""

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
        return "/".join((*self._written(NAMES, NAMES), str(self.asked)))

    def named(self, rng: random.Random, name: str, task: str) -> Problem:
        """The problem under names drawn at random."""
        names, values = rng.sample(NAMES, len(self.lines)), self.values()
        facts = [f"{own}{value}" for own, value in zip(names, values, strict=True)]
        texts = [f"{text}{v}" for text, v in zip(self._written(names, facts), values, strict=True)]
        read = [line.reads for line in self.lines] + [(self.asked,)]
        used = set().union(*read)
        steps = [
            Step(text, _graph(k, read[k]), facts[k] if k in used else "")
            for k, text in enumerate(texts)
        ]
        last = len(self.lines)
        steps.append(Step(f"?{facts[self.asked]}", _graph(last, read[last])))
        lines = "".join(f"{line};" for line in self._written(names, names))
        prompt = f"{lines}?{names[self.asked]}"
        return Problem(name, task, last, prompt, tuple(steps), str(values[self.asked]))

    def _written(self, names: Sequence[str], operands: Sequence[str]) -> list[str]:
        """The lines, each under its own name, what it reads as in `operands`."""

        def write(operand: Operand) -> str:
            return str(operand) if isinstance(operand, int) else operands[operand.line]

        return [
            f"{write(line.left)}{line.operator}{write(line.right)}={names[k]}"
            for k, line in enumerate(self.lines)
        ]


def _graph(step: int, lines: Sequence[int]) -> tuple[int, ...]:
    """What a step reads: the lines that its values are of, and the one before it."""
    return tuple(sorted({*lines, *([step - 1] if step else [])}))


def _operands(line: Line) -> tuple[Operand, Operand]:
    return line.left, line.right


def _apply(left: int, operator: str, right: int) -> int:
    return (left + right if operator == "+" else left - right) % MODULUS


# -- lines drawn at random -------------------------------------------------------------------------


def constant_line(rng: random.Random) -> Line:
    """Two constants: what it comes to is in no prompt."""
    return Line(rng.randint(1, MODULUS - 1), rng.choice("+-"), rng.randint(1, MODULUS - 1))


def unary_line(rng: random.Random, line: int) -> Line:
    """An earlier value changed by a constant; never left as it was."""
    return Line(Ref(line), rng.choice("+-"), rng.randint(1, MODULUS - 1))


def binary_line(rng: random.Random, left: int, right: int) -> Line:
    """The sum or difference of two different earlier values."""
    return Line(Ref(left), rng.choice("+-"), Ref(right))


def weights(sketch: Sketch) -> list[int | None]:
    """How much the answer changes, modulo 5, if a line's value is one more; None for a line that
    does not lead to it."""
    found: list[int | None] = [None] * len(sketch.lines)
    found[sketch.asked] = 1
    for k in range(sketch.asked, -1, -1):
        weight, line = found[k], sketch.lines[k]
        if weight is None:
            continue
        for operand, sign in ((line.left, 1), (line.right, -1 if line.operator == "-" else 1)):
            if isinstance(operand, Ref):
                before = found[operand.line] or 0
                found[operand.line] = (before + weight * sign) % MODULUS
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
    """With another operator, where two values meet: elsewhere it makes no value cancel."""
    return binary_line(rng, *line.reads) if len(line.reads) == 2 else line


def is_right(problem: Problem, text: str) -> bool:
    """Whether a text ends with the value asked for, and says that it is what was asked for."""
    return text.endswith(f"{problem.prompt[-2:]}{problem.answer}")
