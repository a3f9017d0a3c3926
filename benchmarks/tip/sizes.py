"""How much of everything the TIP experiment does: problems, steps, seeds, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

SFT_TOKENS_PER_S = 10_000
"""About what two cores learn from, of a model of a million parameters."""


def _ends(sizes: str) -> tuple[int, int]:
    low, _, high = sizes.partition("-")
    return int(low), int(high or low)


@dataclass(frozen=True)
class Group:
    """Some problems to learn from. `counts`: of each task."""

    name: str
    sizes: str
    counts: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        counts = ",".join(f"{task}={number}" for task, number in self.counts)
        return f"{self.name}:{self.sizes}:{counts}"

    @property
    def steps(self) -> float:
        """Of all solutions together, answers included."""
        return sum(number for _, number in self.counts) * (1 + sum(_ends(self.sizes)) / 2)


@dataclass(frozen=True)
class Lesson:
    """Groups of problems, mixed, each learnt from once, and how."""

    groups: tuple[Group, ...]
    batch: int
    lr: float

    def minutes(self, *, has_registers: bool) -> float:
        """About what it takes two cores. A step has some 14 tokens, its prompt's 6 included, and a
        register."""
        tokens = sum(group.steps for group in self.groups) * (14 + has_registers)
        return tokens / SFT_TOKENS_PER_S / 60


@dataclass(frozen=True)
class Grpo:
    """Steps of training by reward, of so many `minibatches` (updates) each. `weights`: of KV, one
    of which is chosen on the validation split. `valid`: problems in all. `minutes`: about what a
    run takes."""

    steps: int
    prompts: int
    samples: int
    minibatches: int
    lr: float
    weights: tuple[str, ...]
    valid_every: int
    valid: int
    minutes: float


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    `longer`: sizes that nothing was trained on. `base`: what the one model learns, dense, that all
    arms go on from; `own`: what each arm then learns in its own form. `slack`: so many steps late
    at most do labels let go of what is dead. `in_turn`: registers of the null model, as many as
    hold what liveness does. `test`, `longer_test`, `valid`, `caches`: problems of each task
    that are answered; `caches` with other caches than trained with. `gate`: percent of programs
    and trees that supervised models must get right for the rest to be worth its hours.
    `minutes` scales the estimates that are not of training.
    """

    shape: str
    tasks: tuple[str, ...]
    sizes: str
    longer: str
    base: Lesson
    own: Lesson
    registers: int
    slack: int
    in_turn: int
    seeds: tuple[int, ...]
    grpo: Grpo
    test: int
    longer_test: int
    valid: int
    caches: int
    gate: float = 60.0
    throughput: tuple[str, ...] = ()
    crowd: tuple[str, ...] = ()
    long_context: tuple[str, ...] = ()
    is_full: bool = False
    minutes: float = 1.0

    @property
    def max_tokens(self) -> int:
        """Of an answer: ten a step, as in `answers.py`."""
        return 10 * (_ends(self.sizes)[1] + 1)


def _group(name: str, sizes: str, **counts: int) -> Group:
    return Group(name, sizes, tuple(counts.items()))


def _base(share: float = 1.0) -> tuple[Group, ...]:
    """What is short enough for a model to learn that names stand for values."""
    groups = (
        _group("tiny", "2-6", recall=30000, chain=10000),
        _group("small", "3-12", tree=40000, chain=15000, recall=20000),
        _group("short", "6-12", program=20000, slots=20000, dag=20000),
    )
    return tuple(_scaled(group, share) for group in groups)


def _own(share: float = 1.0, **more: int) -> tuple[Group, ...]:
    """Short problems too: of long ones alone, what to let go of is not learnt."""
    counts = {"program": 7000, "tree": 7000, "chain": 2000, **more}
    ends = {"few": "6-12", "some": "12-20", "whole": "22-30"}
    groups = (_group(name, sizes, **counts) for name, sizes in ends.items())
    return tuple(_scaled(group, share) for group in groups)


def _scaled(group: Group, share: float) -> Group:
    return replace(group, counts=tuple((task, int(n * share)) for task, n in group.counts))


NORMAL = Sizes(
    shape="tiny-1m",
    tasks=("program", "tree", "chain"),
    sizes="22-30",
    longer="34-42",
    base=Lesson(_base(0.5), 8, 1e-3),
    own=Lesson(_own(0.6), 8, 1e-3),
    registers=8,
    slack=0,
    in_turn=5,
    seeds=(0, 1, 2),
    grpo=Grpo(40, 8, 8, 4, 2e-4, ("0.3", "1"), 10, 54, minutes=5),
    test=126,
    longer_test=63,
    valid=63,
    caches=45,
)
"""With perfect labels programs and trees of 22 to 30 steps hold 67.2 % less than dense text, with
labels up to one step late 63.7 %; of 16 to 24 steps 60.1 %."""
FULL = Sizes(
    shape="tiny-1m",
    tasks=("program", "tree", "chain", "slots", "dag"),
    sizes="22-30",
    longer="34-42",
    base=Lesson(_base(), 8, 1e-3),
    own=Lesson(_own(slots=7000, dag=7000), 8, 1e-3),
    registers=8,
    slack=0,
    in_turn=5,
    seeds=(0, 1, 2),
    grpo=Grpo(80, 12, 8, 4, 2e-4, ("0.1", "0.3", "1", "3"), 10, 72, minutes=20),
    test=252,
    longer_test=126,
    valid=126,
    caches=252,
    is_full=True,
    minutes=2.8,
)
QUICK = Sizes(
    shape="tiny-1m",
    tasks=("program", "tree", "chain"),
    sizes="6-7",
    longer="8-9",
    base=Lesson(_base(0.0004), 8, 1e-3),
    own=Lesson((_group("whole", "6-7", program=8, tree=8, chain=8),), 8, 1e-3),
    registers=8,
    slack=0,
    in_turn=5,
    seeds=(0,),
    grpo=Grpo(1, 2, 2, 1, 2e-4, ("0.3",), 1, 2, minutes=0.1),
    test=2,
    longer_test=2,
    valid=2,
    caches=2,
    gate=0.0,
    throughput=("--num", "4", "--pairs", "1", "--sizes", "6-7"),
    crowd=("--requests", "3", "--tokens", "24", "--fit", "2", "--pairs", "1"),
    long_context=("--context", "96", "--live", "32", "--tokens", "8", "--pairs", "1"),
    minutes=0.02,
)
