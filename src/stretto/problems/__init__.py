"""Problems whose dependence graph is known: what each step of the solution reads, and whether an
answer is right. `problem` makes one; see docs/problems.md."""

from stretto.data.labels import LABELS, Labelled, Labels
from stretto.problems.base import ALPHABET, Problem, Step
from stretto.problems.draw import (
    LONGER_SIZES,
    SPLITS,
    TASKS,
    TRAIN_SIZES,
    parse_sizes,
    problem,
    problems,
)

__all__ = [
    "ALPHABET",
    "LABELS",
    "LONGER_SIZES",
    "SPLITS",
    "TASKS",
    "TRAIN_SIZES",
    "Labelled",
    "Labels",
    "Problem",
    "Step",
    "parse_sizes",
    "problem",
    "problems",
]
