"""Task `chain`: each line changes the value of the one before. Two steps are ever live, so whoever
keeps the last few steps loses nothing: the negative control."""

from __future__ import annotations

import random

from stretto.problems.lines import Sketch, constant_line, unary_line

MIN_SIZE = 2


def draw(rng: random.Random, size: int) -> Sketch:
    lines = [constant_line(rng), *(unary_line(rng, k) for k in range(size - 1))]
    return Sketch(tuple(lines), size - 1)
