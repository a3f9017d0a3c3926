"""Task `slots`: straight-line arithmetic over a few slots, updated in no order.

Two hot slots are updated again and again, in no order, each by a constant. The cold slots are set
at the start, by two lines, so that the prompt's constants alone do not say what they hold, and
taken up once, into a hot one, often much later. Every update has a name of its own, so a name has
one value, which is read once. All slots end up in the value asked for.
"""

from __future__ import annotations

import random

from stretto.problems.lines import Line, Sketch, binary_line, constant_line, lasting, unary_line

MIN_SIZE = 6
NUM_HOT = 2


def num_slots(size: int) -> int:
    """4, and in the shortest problems 3."""
    return 4 if size >= 10 else 3


def draw(rng: random.Random, size: int) -> Sketch:
    slots = num_slots(size)
    lines: list[Line] = []
    holder = [0] * slots  # of each slot the line with its value; the first two are hot
    for slot in rng.sample(range(slots), slots):
        lines.append(constant_line(rng))
        if slot >= NUM_HOT:
            lines.append(unary_line(rng, len(lines) - 1))
        holder[slot] = len(lines) - 1
    num_updates = size - len(lines) - 1
    late = range(num_updates // 3, num_updates)
    cold = range(NUM_HOT, slots)
    taken_up = dict(zip(rng.sample(late, len(cold)), cold, strict=True))
    for step in range(num_updates):
        hot = rng.randrange(NUM_HOT)
        if step in taken_up:
            lines.append(binary_line(rng, holder[hot], holder[taken_up[step]]))
        else:
            lines.append(unary_line(rng, holder[hot]))
        holder[hot] = len(lines) - 1
    lines.append(binary_line(rng, holder[0], holder[1]))
    return lasting(rng, Sketch(tuple(lines), size - 1))
