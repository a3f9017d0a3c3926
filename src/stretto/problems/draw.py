"""Problems by task, size, split, seed and index: the same five always make the same problem."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from stretto.data.select import Split
from stretto.errors import InvalidInput, UnknownName
from stretto.problems import chain, countdown, dag, lines, program, recall, slots, tree
from stretto.problems.base import NAMES, Problem

VERSION = 7
"""Raised when the problem of some task, size, split, seed and index changes."""

SPLITS = {"train": Split(0, 80), "valid": Split(80, 90), "test": Split(90, 100)}
"""Percents of the hashes of problems, names left out of account: a problem of one split is in no
other, under other names either."""
TRAIN_SIZES = (12, 24)
"""Least and largest size to train on: prompt and annotated response have at most 360 tokens."""
LONGER_SIZES = (28, 40)
"""Sizes to see how far what was learnt reaches."""
MAX_DRAWS = 2000


class Sketch(Protocol):
    """A problem without names. `canonical` is the same for all that differ in names alone."""

    def canonical(self) -> str: ...

    def named(self, rng: random.Random, name: str, task: str) -> Problem: ...


@dataclass(frozen=True)
class Task:
    """How problems of a kind are drawn and their answers checked. Sizes count the steps before the
    one that gives the answer."""

    draw: Callable[[random.Random, int], Sketch]
    is_right: Callable[[Problem, str], bool]
    min_size: int
    max_size: int


TASKS = {
    "program": Task(program.draw, lines.is_right, program.MIN_SIZE, len(NAMES)),
    "slots": Task(slots.draw, lines.is_right, slots.MIN_SIZE, len(NAMES)),
    "tree": Task(tree.draw, lines.is_right, tree.MIN_SIZE, len(NAMES)),
    "chain": Task(chain.draw, lines.is_right, chain.MIN_SIZE, len(NAMES)),
    "dag": Task(dag.draw, lines.is_right, dag.MIN_SIZE, len(NAMES)),
    "recall": Task(recall.draw, lines.is_right, recall.MIN_SIZE, len(NAMES)),
    "countdown": Task(
        countdown.draw,
        countdown.is_right,
        countdown.MIN_SIZE,
        len(NAMES) - countdown.NUM_GIVEN,
    ),
}


def problem(task: str, size: int, index: int, *, split: str = "train", seed: int = 0) -> Problem:
    """The problem of these five, whatever else is made. Raises `UnknownName` and `InvalidInput`."""
    found = _task(task)
    if split not in SPLITS:
        raise UnknownName("split", split, list(SPLITS))
    if not found.min_size <= size <= found.max_size:
        raise InvalidInput(
            f"task {task} has no problems of size {size}; give {found.min_size} to {found.max_size}"
        )
    name = f"{task}-{size}-{split}-{seed}-{index}"
    for attempt in range(MAX_DRAWS):
        rng = random.Random(f"problems/{VERSION}/{name}/{attempt}")
        sketch = found.draw(rng, size)
        digest = hashlib.sha256(f"{task}/{sketch.canonical()}".encode()).hexdigest()[:16]
        if SPLITS[split].holds(digest):
            return sketch.named(rng, name, task)
    raise InvalidInput(f"no problem {name} in {MAX_DRAWS} draws; ask for another size")


def problems(
    task: str,
    sizes: tuple[int, int],
    count: int,
    *,
    split: str = "train",
    seed: int = 0,
    start: int = 0,
) -> Iterator[Problem]:
    """`count` problems of sizes from least to largest in turn, from number `start` on: a larger
    count has all that a smaller one had. Raises as `problem` does, and for a count below 1."""
    least, largest = sizes
    if least > largest:
        raise InvalidInput(f"sizes {least}-{largest} are no range; give the smaller one first")
    if count < 1:
        raise InvalidInput(f"the number of problems must be at least 1, got {count}")
    num_sizes = largest - least + 1
    for number in range(start, start + count):
        index, step = divmod(number, num_sizes)
        yield problem(task, least + step, index, split=split, seed=seed)


def parse_sizes(text: str) -> tuple[int, int]:
    """From SIZE or LOW-HIGH, such as 12-24. Raises `InvalidInput`."""
    low, dash, high = text.partition("-")
    parts = (low, high) if dash else (low, low)
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise InvalidInput(f"size {text!r} is no number of steps; give one, or LOW-HIGH")
    least, largest = int(parts[0]), int(parts[1])
    if least > largest:
        raise InvalidInput(f"size {text!r} is no range; give the smaller one first")
    return least, largest


def is_right(problem: Problem, text: str) -> bool:
    """Whether a response without registers ends with a right answer."""
    return _task(problem.task).is_right(problem, text)


def _task(name: str) -> Task:
    if name not in TASKS:
        raise UnknownName("task", name, list(TASKS))
    return TASKS[name]
