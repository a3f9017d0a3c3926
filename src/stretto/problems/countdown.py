"""Task `countdown`: reach a number with all four given ones, by trying in order and turning back.

The prompt `a12b03c07d05?21` gives four numbers their names and asks for 21. A step `e=a+b:15` tries
an operation on two numbers that are left; the result joins them. Tries go depth first: pairs in the
order in which their numbers came to be, of each pair sum, difference (larger less smaller) and
product; results are from 1 to 99. Where all four are used up and the target is missed, the search
turns back, and nothing will read that branch again. The last line `?k` names the number that is the
target.

Here numbers of two digits stand in the steps, and the answer is right if what it names is made of
each given number once and is the target, whichever way it was found.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.errors import InvalidInput
from stretto.problems.base import NAMES, Problem, Step

MIN_SIZE = 4
NUM_GIVEN = 4
LARGEST_GIVEN = 20
LARGEST = 99
MAX_TRIES = 20_000

_GIVEN = re.compile(r"([a-zA-Z])(\d\d)")
_STEP = re.compile(r"([a-zA-Z])=([a-zA-Z])([+*-])([a-zA-Z])")
_ANSWER = re.compile(r"\?([a-zA-Z])$")


@dataclass(frozen=True, slots=True)
class Try:
    """A step of the search. Numbers are known by their order, the given ones first; `path`: the
    tries that this one builds on, `before`: the last one that built on the same."""

    left: int
    operator: str
    right: int
    value: int
    path: tuple[int, ...]
    before: int | None

    @property
    def is_whole(self) -> bool:
        """Whether it has used every given number."""
        return len(self.path) == NUM_GIVEN - 2


@dataclass(frozen=True)
class Sketch:
    """A problem without names."""

    given: tuple[int, ...]
    tries: tuple[Try, ...]

    @property
    def target(self) -> int:
        return self.tries[-1].value

    def canonical(self) -> str:
        """The given numbers in whatever order, and the target."""
        return f"{sorted(self.given)}/{self.target}"

    def named(self, rng: random.Random, name: str, task: str) -> Problem:
        names = rng.sample(NAMES, NUM_GIVEN + len(self.tries))
        steps = []
        for k, one in enumerate(self.tries):
            own, left, right = (names[i] for i in (NUM_GIVEN + k, one.left, one.right))
            before = [] if one.before is None else [one.before]
            reads = {*one.path, *before, *([k - 1] if k else [])}
            text = f"{own}={left}{one.operator}{right}:{one.value:02}"
            steps.append(Step(text, tuple(sorted(reads)), f"{own}:{one.value:02}"))
        size, answer = len(self.tries), names[-1]
        steps.append(Step(f"?{answer}", (size - 1,)))
        pairs = zip(names, self.given, strict=False)
        prompt = "".join(f"{own}{value:02}" for own, value in pairs) + f"?{self.target:02}"
        return Problem(name, task, size, prompt, tuple(steps), answer)


def draw(rng: random.Random, size: int) -> Sketch:
    """Numbers for which the search ends at the step wanted: the target is what that step comes to,
    and no earlier step that used all numbers came to the same."""
    for _ in range(MAX_TRIES):
        given = tuple(rng.randint(1, LARGEST_GIVEN) for _ in range(NUM_GIVEN))
        tries = tuple(itertools.islice(search(given), size))
        if len(tries) == size and tries[-1].is_whole:
            missed = {one.value for one in tries[:-1] if one.is_whole}
            if tries[-1].value not in missed:
                return Sketch(given, tries)
    raise InvalidInput(f"no countdown of {size} steps was found; ask for another size")


def search(given: tuple[int, ...]) -> Iterator[Try]:
    """All tries, in order."""
    counter = itertools.count()
    return _search([(i, value) for i, value in enumerate(given)], (), counter)


def _search(
    left: list[tuple[int, int]], path: tuple[int, ...], counter: Iterator[int]
) -> Iterator[Try]:
    before: int | None = None
    for (i, a), (j, b) in itertools.combinations(left, 2):
        first, second = ((i, a), (j, b)) if a >= b else ((j, b), (i, a))
        options = (
            (i, "+", j, a + b),
            (first[0], "-", second[0], first[1] - second[1]),
            (i, "*", j, a * b),
        )
        for one, operator, other, value in options:
            if not 1 <= value <= LARGEST:
                continue
            number = next(counter)
            yield Try(one, operator, other, value, path, before)
            before = number
            rest = [pair for pair in left if pair[0] not in (i, j)]
            if rest:
                rest.append((NUM_GIVEN + number, value))
                yield from _search(rest, (*path, number), counter)


def is_right(problem: Problem, text: str) -> bool:
    """Whether what a text's last line names is the target and made of each given number once.

    Results are worked out anew: a wrong one in the text is not believed.
    """
    body, _, target = problem.prompt.partition("?")
    numbers = {name: (int(value), (name,)) for name, value in _GIVEN.findall(body)}
    given = sorted(numbers)
    for name, left, operator, right in _STEP.findall(text):
        numbers.pop(name, None)
        if left in numbers and right in numbers:
            (a, used), (b, also) = numbers[left], numbers[right]
            if {*used} & {*also}:
                continue  # no way to the target; numbers stay small, whatever a model writes
            value = {"+": a + b, "-": a - b, "*": a * b}[operator]
            numbers[name] = (value, tuple(sorted((*used, *also))))
    said = _ANSWER.search(text)
    if said is None or said[1] not in numbers:
        return False
    value, used = numbers[said[1]]
    return value == int(target) and list(used) == given
