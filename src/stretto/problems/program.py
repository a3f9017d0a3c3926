"""Task `program`: straight-line code of a stack machine.

A line pushes a new value, changes the topmost by a constant, or puts the two topmost together. So a
value is read once, and the one put down last is taken up first; those at the bottom lie there until
near the end, while the topmost is changed again and again. Every line has a name of its own.
"""

from __future__ import annotations

import random

from stretto.problems.lines import Line, Sketch, binary_line, constant_line, lasting, unary_line

MIN_SIZE = 6
MAX_DEPTH = 4
KEPT = 2
"""So many at the bottom are not put together until the last third."""


def draw(rng: random.Random, size: int) -> Sketch:
    lines: list[Line] = []
    stack: list[int] = []
    for number in range(size):
        ways = _ways(len(stack), size - number, is_late=number >= size - size // 3)
        way = rng.choice(ways)
        if way == "push":
            lines.append(constant_line(rng))
        elif way == "change":
            lines.append(unary_line(rng, stack.pop()))
        else:
            right, left = stack.pop(), stack.pop()
            lines.append(binary_line(rng, left, right))
        stack.append(number)
    return lasting(rng, Sketch(tuple(lines), size - 1))


def _ways(depth: int, left: int, *, is_late: bool) -> list[str]:
    """What a line may do with a stack of so many values when so many lines are `left`, its own
    included: after the last one value remains."""
    ways = []
    if depth < MAX_DEPTH and depth + 1 <= left:
        ways.append("push")
    if depth and depth <= left:
        ways += ["change", "change"]
    if depth > (1 if is_late else KEPT) and depth - 1 <= left:
        ways.append("join")
    return ways
