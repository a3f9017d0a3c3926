"""Task `recall`: constants, then lines that each read one or two of them, drawn at random; any line
may be asked for. No order and no structure says which, so what it takes is to look values up by
their names, which all other tasks ask for as well."""

from __future__ import annotations

import random

from stretto.problems.lines import Line, Sketch, binary_line, constant_line, unary_line

MIN_SIZE = 2


def draw(rng: random.Random, size: int) -> Sketch:
    constants = range((size + 1) // 2)
    lines = [constant_line(rng) for _ in constants]
    lines += [_reading(rng, constants) for _ in range(size - len(lines))]
    return Sketch(tuple(lines), rng.randrange(size))


def _reading(rng: random.Random, constants: range) -> Line:
    if len(constants) > 1 and rng.random() < 0.5:
        return binary_line(rng, *rng.sample(constants, 2))
    return unary_line(rng, rng.choice(constants))
