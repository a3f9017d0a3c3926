"""From what steps read to the registers that hold them: liveness, null models, what they cost.

Steps are numbered from 0 in the order of the text; `reads[k]` are the earlier steps that step k
needs, `lengths[k]` its tokens with its register. A step's KV is let go of when its register is
written again, so it costs memory from its last use up to then: which dead step a new one replaces
matters. The largest first is optimal, since each step lets go of one at most (unit jobs with
release dates and weights, an exchange argument), and needs no more registers than liveness does.

Strict: the register of step j may be taken by step k if the last step that reads j comes before k.
Grace: also if it is k itself, whose register still sees j.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

Reads = Sequence[Sequence[int]]


def last_uses(reads: Reads) -> list[int]:
    """Of each step the last one that reads it; itself if none does."""
    last = list(range(len(reads)))
    for k, needed in enumerate(reads):
        for j in needed:
            last[j] = max(last[j], k)
    return last


def live_counts(reads: Reads, *, grace: bool = False) -> list[int]:
    """How many registers are in need while each step is written, its own included."""
    last, ahead = last_uses(reads), int(grace)
    return [1 + sum(last[j] >= k + ahead for j in range(k)) for k in range(len(reads))]


def max_live(reads: Reads, *, grace: bool = False) -> int:
    """The least number of registers that hold every step until its last use; 0 of no steps."""
    return max(live_counts(reads, grace=grace), default=0)


def deaths(registers: Sequence[int]) -> list[int | None]:
    """Of each step the one that takes its register, or None."""
    taken: dict[int, int] = {}
    found: list[int | None] = [None] * len(registers)
    for k in range(len(registers) - 1, -1, -1):
        found[k] = taken.get(registers[k])
        taken[registers[k]] = k
    return found


def needed_kills(
    registers: Sequence[int], reads: Reads, *, grace: bool = False
) -> list[tuple[int, int]]:
    """Pairs (step, killer) where a step is let go of while it, or a later step, still needs it."""
    last, ahead = last_uses(reads), int(grace)
    return [
        (j, k) for j, k in enumerate(deaths(registers)) if k is not None and last[j] >= k + ahead
    ]


def mean_live(
    lengths: Sequence[int], registers: Sequence[int], *, grace: bool = False, before: int = 0
) -> float:
    """Generated tokens that a token of the response sees, itself included, on average: a trace's
    `generated_mean`. 0.0 of no tokens. `before`: tokens before the first step, which stay.

    A token is seen from its own place up to that of the register that lets go of it (grace: this
    one included), so the sum over tokens of those lengths is the sum over places of what is seen.
    """
    starts, at = [], before
    for length in lengths:
        starts.append(at)
        at += length
    total = sum(at - place for place in range(before))
    for start, length, killer in zip(starts, lengths, deaths(registers), strict=True):
        end = at if killer is None else starts[killer] + int(grace)
        total += sum(end - place for place in range(start, start + length))
    return total / at if at else 0.0


# -- assignments -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assigned:
    """A register a step. `hurried`: steps let go of before their slack was over, for want of a
    register."""

    registers: tuple[int, ...]
    hurried: int = 0


def liveness(
    lengths: Sequence[int],
    reads: Reads,
    num_registers: int,
    *,
    grace: bool = False,
    slack: Sequence[int] | None = None,
) -> Assigned | None:
    """The register of the largest dead step (of the latest of equal ones), else the lowest empty
    one. None if at some step there is neither: `max_live` is more than `num_registers`.

    `slack[j]`: so many steps more is step j taken to be alive after its last use, unless there is
    no other register.
    """
    last, ahead = last_uses(reads), int(grace)
    due = last if slack is None else [a + b for a, b in zip(last, slack, strict=True)]
    holds: dict[int, int] = {}
    registers: list[int] = []
    hurried = 0
    for k in range(len(reads)):
        dead = [r for r, j in holds.items() if due[j] < k + ahead]
        early = [r for r, j in holds.items() if last[j] < k + ahead]
        empty = next((r for r in range(num_registers) if r not in holds), None)
        if dead:
            register = min(dead, key=lambda r: (-lengths[holds[r]], -holds[r]))
        elif empty is not None:
            register = empty
        elif early:
            register = min(early, key=lambda r: (due[holds[r]], r))
            hurried += 1
        else:
            return None
        holds[register] = k
        registers.append(register)
    return Assigned(tuple(registers), hurried)


def stack(reads: Reads, num_registers: int, *, grace: bool = False) -> Assigned | None:
    """The register of the first of the steps that have just died; if none has, the next free one
    above the last two that were written. None as for `liveness`.

    It holds more than `liveness` does and is told by less: which step is the largest dead one
    nothing in the text says, but in the prompt, whereas here the last steps do, wherever what came
    last is needed first and there are registers enough.
    """
    last, ahead = last_uses(reads), int(grace)
    holds: dict[int, int] = {}
    registers: list[int] = []
    for k in range(len(reads)):
        over = [j for j in holds.values() if last[j] == k - 1 + ahead]
        needed = {r for r, j in holds.items() if last[j] >= k + ahead}
        if over:
            register = registers[min(over)]
        elif len(needed) == num_registers:
            return None
        else:
            first = _upper(registers[-2:], num_registers) + 1 if registers else 0
            ways = ((first + r) % num_registers for r in range(num_registers))
            register = next(r for r in ways if r not in needed)
        holds[register] = k
        registers.append(register)
    return Assigned(tuple(registers))


def _upper(last: Sequence[int], num_registers: int) -> int:
    """Of the one or two registers last written the upper one, counted round: the first of two if
    it is less than half of all above the second."""
    above = (last[0] - last[-1]) % num_registers
    return last[0] if above < num_registers / 2 else last[-1]


def round_robin(num_steps: int, num_registers: int) -> Assigned:
    """Registers in turn: the last `num_registers` steps are kept, whoever needs the others."""
    return Assigned(tuple(k % num_registers for k in range(num_steps)))


def at_random(num_steps: int, num_registers: int, rng: random.Random) -> Assigned:
    """Any register for any step."""
    return Assigned(tuple(rng.randrange(num_registers) for _ in range(num_steps)))


def shifted(assigned: Assigned, num_registers: int, first: int) -> Assigned:
    """The same, counted from register `first` on, past the last one from 0."""
    registers = tuple((first + r) % num_registers for r in assigned.registers)
    return replace(assigned, registers=registers)
