"""Task `dag`: a random graph with distractors.

Values wait to be used in no particular order, so no stack holds them. A distractor is a line that
nothing reads; every other line leads to the one asked for, which need not be the last.
"""

from __future__ import annotations

import random

from stretto.problems.lines import Line, Sketch, binary_line, constant_line, lasting, unary_line

MIN_SIZE = 5
MAX_WAITING = 5
"""Values that wait at once, at most."""
DISTRACTORS = 0.2
"""Share of the lines that nothing reads."""


def draw(rng: random.Random, size: int) -> Sketch:
    num_distractors = round(DISTRACTORS * size)
    distractors = set(rng.sample(range(2, size), num_distractors))
    lines: list[Line] = []
    waiting: list[int] = []
    num_left = size - num_distractors
    for step in range(size):
        if step in distractors:
            lines.append(_side_line(rng, waiting))
            continue
        num_left -= 1
        lines.append(_line(rng, waiting, num_left))
        waiting.append(step)
    return lasting(rng, Sketch(tuple(lines), waiting[0]))


def _side_line(rng: random.Random, waiting: list[int]) -> Line:
    """Reads what waits, which goes on waiting."""
    if len(waiting) > 1 and rng.random() < 0.5:
        return binary_line(rng, *rng.sample(waiting, 2))
    return unary_line(rng, rng.choice(waiting))


def _line(rng: random.Random, waiting: list[int], num_left: int) -> Line:
    """A line to be read later. Takes out of `waiting` what is not to be read again; after the
    `num_left` further lines nothing must wait but the last of them."""
    most = min(MAX_WAITING, num_left + 1)  # each line to come can take one away
    rng.shuffle(waiting)
    kinds = ["join"] if len(waiting) >= 2 else []
    if len(waiting) < most:
        kinds += ["root"] if len(waiting) < 2 or rng.random() < 0.5 else []
        kinds += ["reuse"] if len(waiting) >= 2 else []
    if waiting and len(waiting) <= most:
        kinds += ["change"]
        kinds += ["lean"] if len(waiting) >= 2 else []
    match rng.choice(kinds or ["root"]):
        case "root":
            return constant_line(rng)
        case "reuse":
            return _side_line(rng, waiting)
        case "change":
            return unary_line(rng, waiting.pop())
        case "lean":
            return binary_line(rng, waiting.pop(), waiting[0])
    return binary_line(rng, waiting.pop(), waiting.pop())
