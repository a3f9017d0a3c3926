"""Task `recall`: lines of constants, one of which is asked for. Nothing is computed from another
line, so what it takes is to look a value up by its name, which all other tasks ask for as well."""

from __future__ import annotations

import random

from stretto.problems.lines import Sketch, constant_line

MIN_SIZE = 2


def draw(rng: random.Random, size: int) -> Sketch:
    return Sketch(tuple(constant_line(rng) for _ in range(size)), rng.randrange(size))
