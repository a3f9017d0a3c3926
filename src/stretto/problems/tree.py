"""Task `tree`: an expression tree, evaluated in post-order: both sides of a node, then the node.

A leaf is two constants. Sides are of nearly equal size; a perfect tree of depth d needs d + 2
registers. A tree of L leaves has 2 L - 1 nodes; at an even size one more line changes the root.
"""

from __future__ import annotations

import random

from stretto.problems.lines import Line, Sketch, binary_line, constant_line, unary_line

MIN_SIZE = 3


def draw(rng: random.Random, size: int) -> Sketch:
    lines: list[Line] = []
    root = _evaluate(rng, (size + 1) // 2, lines)
    if size % 2 == 0:
        lines.append(unary_line(rng, root))
    return Sketch(tuple(lines), size - 1)


def _evaluate(rng: random.Random, num_leaves: int, lines: list[Line]) -> int:
    """Appends the lines of a tree; returns the line of its root."""
    if num_leaves == 1:
        lines.append(constant_line(rng))
        return len(lines) - 1
    smaller = num_leaves // 2
    first = rng.choice((smaller, num_leaves - smaller))
    left = _evaluate(rng, first, lines)
    right = _evaluate(rng, num_leaves - first, lines)
    lines.append(binary_line(rng, left, right))
    return len(lines) - 1
