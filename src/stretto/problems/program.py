"""Task `program`: straight-line arithmetic over a few slots.

Two hot slots are updated again and again, each time from their own value, by a constant or by the
other one; the cold slots are set at the start, changed once (so that the prompt's constants alone
do not say what they hold), and read rarely, often much later. Every update has a name of its own,
so a name has one value. All that is read ends up in the value asked for.
"""

from __future__ import annotations

import random

from stretto.problems.lines import Line, Sketch, binary_line, constant_line, lasting, unary_line

MIN_SIZE = 6
NUM_HOT = 2
SECOND_READ = 0.5
"""How often a cold slot is read twice."""
COLD_UPDATE = 0.15
"""How often a step that reads no cold slot changes one that is still to be read."""


def num_slots(size: int) -> int:
    """2 and one more for every twelve steps, at least 3: 4 at 24 steps, 5 at 40."""
    return max(3, 2 + size // 12)


def draw(rng: random.Random, size: int) -> Sketch:
    slots = num_slots(size)
    lines = [constant_line(rng) for _ in range(slots)]
    holder = list(range(slots))  # of each slot the line with its value; the first two are hot
    rng.shuffle(holder)
    for slot in range(NUM_HOT, slots):
        lines.append(unary_line(rng, holder[slot]))
        holder[slot] = len(lines) - 1
    num_updates = size - len(lines) - 1
    reads = _cold_reads(rng, slots, num_updates)
    for step in range(num_updates):
        cold = reads.get(step)
        pending = sorted({slot for at, slot in reads.items() if at > step})
        if cold is None and pending and rng.random() < COLD_UPDATE:
            changed = rng.choice(pending)
            lines.append(unary_line(rng, holder[changed]))
        else:
            changed = rng.randrange(NUM_HOT)
            lines.append(_hot_update(rng, holder, changed, cold))
        holder[changed] = len(lines) - 1
    lines.append(binary_line(rng, holder[0], holder[1]))
    return lasting(rng, Sketch(tuple(lines), size - 1))


def _cold_reads(rng: random.Random, slots: int, num_steps: int) -> dict[int, int]:
    """Which steps read which cold slot: each once in the later half, some once more."""
    cold = list(range(NUM_HOT, slots))
    late = list(range(num_steps // 2, num_steps))
    reads = dict(zip(rng.sample(late, len(cold)), cold, strict=True))
    for slot in cold:
        free = [step for step in range(num_steps) if step not in reads]
        if free and rng.random() < SECOND_READ:
            reads[rng.choice(free)] = slot
    return reads


def _hot_update(rng: random.Random, holder: list[int], slot: int, cold: int | None) -> Line:
    if cold is not None:
        return binary_line(rng, holder[slot], holder[cold])
    if rng.random() < 0.5:
        return binary_line(rng, holder[slot], holder[1 - slot])
    return unary_line(rng, holder[slot])
