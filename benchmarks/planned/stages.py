"""The stages of the planned experiment: which commands, how large, and what is kept of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cells import ARMS, BASE, COMPUTE_ARMS, REFERENCE, Arm, arm_of

from stretto.bench.stages import Command, Stage

CHOSEN = "chosen/chosen.json"
FILES = ("metrics.jsonl", "summary.json", "config.json", "environment.json")


@dataclass(frozen=True)
class Group:
    """Some problems, of so many `parts`."""

    name: str
    parts: str
    num: int

    @property
    def text(self) -> str:
        return f"{self.name}:{self.parts}:{self.num}"


@dataclass(frozen=True)
class Lesson:
    """How all groups are learnt from, mixed."""

    epochs: float
    batch: int = 8
    lr: float = 1e-3


@dataclass(frozen=True)
class Sizes:
    """How much of everything. `groups`: the problems that are learnt from; `base`: how the base
    does; `own`: how each arm then does, `shares` of its epochs for arms that learn less.
    `epoch_minutes`: about what an epoch takes the reference on two cores, at some 14,000 tokens a
    second. `valid`: problems that ways are chosen on. `test`: problems, answered in all ways,
    `a_stage` of them in each stage; `more`: further ones, in the ways alone that claims compare.
    `costly`: test problems that are answered at the cost of a larger model. `sets`: of eight
    problems each, answered at once and one by one. `answer_minutes`: about what a stage takes two
    cores to answer in all ways."""

    shape: str
    groups: tuple[Group, ...]
    base: Lesson
    own: Lesson
    epoch_minutes: float
    shares: tuple[str, ...]
    valid: int
    test: int
    a_stage: int
    more: int
    costly: int
    sets: int
    seed: int = 0
    answer_minutes: int = 20


GROUPS = (Group("one", "1", 10000), Group("few", "2-3", 10000), Group("whole", "4-5", 10000))
"""Of several sizes, so that no part always stands in the same place."""
NORMAL = Sizes(
    "tiny-1m", GROUPS, Lesson(2), Lesson(1), epoch_minutes=8, shares=("0.5",),
    valid=40, test=100, a_stage=50, more=900, costly=60, sets=15,
)  # fmt: skip
FULL = Sizes(
    "tiny-1m", GROUPS, Lesson(2), Lesson(2), epoch_minutes=8, shares=("0.125", "0.25", "0.5"),
    valid=100, test=300, a_stage=100, more=1700, costly=100, sets=15, answer_minutes=40,
)  # fmt: skip
QUICK = Sizes(
    "tiny-1m", tuple(replace(group, num=16) for group in GROUPS), Lesson(1), Lesson(1),
    epoch_minutes=0, shares=("0.5",),
    valid=1, test=1, a_stage=1, more=1, costly=1, sets=1, answer_minutes=1,
)  # fmt: skip


def stages_of(sizes: Sizes) -> list[Stage]:
    """All stages, in an order in which each finds what it reads. Whether plans are learnt at all is
    seen first."""
    order = dict.fromkeys((REFERENCE, "sparse", *ARMS))
    return [
        _data(sizes),
        _base(sizes),
        *(_train(sizes, name, ARMS[name].epochs) for name in order),
        *(
            _train(sizes, f"{name}-{share}", float(share))
            for share in sizes.shares
            for name in COMPUTE_ARMS
        ),
        _asked(sizes, "valid", "knobs", _of("valid", 0, sizes.valid)),
        _asked(sizes, "valid-costly", "costly", _of("valid", 0, sizes.valid)),
        _choice(),
        *_answers(sizes),
        _throughput(sizes),
        _report(),
    ]


def _data(sizes: Sizes) -> Stage:
    command = (
        "python", "prepare.py",
        *(part for group in sizes.groups for part in ("--group", group.text)),
        "--shape", sizes.shape, "--seed", str(sizes.seed), "--out", "data",
    )  # fmt: skip
    return Stage("data", max(1, sum(group.num for group in sizes.groups) // 12000), (command,))


def _base(sizes: Sizes) -> Stage:
    return _learn(sizes, ARMS[REFERENCE], sizes.base, model="data/start", out=BASE)


def _train(sizes: Sizes, run: str, times: float) -> Stage:
    """`times`: as many epochs."""
    lesson = replace(sizes.own, epochs=sizes.own.epochs * times)
    return _learn(sizes, ARMS[arm_of(run)], lesson, model=f"{BASE}/model", out=run)


def _learn(sizes: Sizes, arm: Arm, lesson: Lesson, *, model: str, out: str) -> Stage:
    command = (
        "stretto", "train", "sft", "--model", model,
        *(part for g in sizes.groups for part in ("--data", f"data/{g.name}-{arm.rows}.jsonl")),
        *arm.options,
        "--full", "--dtype", "float32", "--schedule", "cosine", "--lr", str(lesson.lr),
        "--batch", str(lesson.batch), "--epochs", f"{lesson.epochs:g}",
        "--seed", str(sizes.seed), "--pack-tokens", "4096", "--checkpoint-every", "500",
        "--out", out,
    )  # fmt: skip
    minutes = round(sizes.epoch_minutes * lesson.epochs * arm.cost)
    return Stage(out, max(1, minutes), (command,), ("model", *FILES))


def _answers(sizes: Sizes) -> list[Stage]:
    """Some problems a stage, in all ways; then more in the ways that claims compare; then those of
    the first again, in the plain ways of arms that learnt less, and at the cost of a larger
    model."""
    stages = []
    for number, first in enumerate(range(0, sizes.test, sizes.a_stage)):
        count = min(sizes.a_stage, sizes.test - first)
        stages.append(_asked(sizes, f"part-{number}", "knobs", _of("test", first, count)))
    more = _of("test", sizes.test, sizes.more)
    stages.append(_asked(sizes, "more", f"chosen={CHOSEN}", more))
    for share in sizes.shares:
        same = _of("test", 0, sizes.test)
        stages.append(_asked(sizes, f"compute-{share}", f"compute={share}", same))
    stages.append(_asked(sizes, "costly", "costly", _of("test", 0, sizes.costly)))
    return stages


def _of(split: str, first: int, num: int) -> Command:
    return ("--split", split, "--first", str(first), "--num", str(num))


def _asked(sizes: Sizes, name: str, cells: str, problems: Command) -> Stage:
    out = f"answers/{name}.jsonl"
    command = ("python", "answers.py", "--cells", cells, *problems, "--out", out)
    kept = (f"{name}.jsonl",)
    is_short = cells.startswith(("chosen", "compute"))
    minutes = max(1, sizes.answer_minutes // 2) if is_short else sizes.answer_minutes
    return Stage(f"answers-{name}", minutes, (command,), kept, "answers")


def _choice() -> Stage:
    command = (
        "python", "choose.py", "--answers", "answers/valid.jsonl",
        "--costly", "answers/valid-costly.jsonl", "--out", CHOSEN,
    )  # fmt: skip
    return Stage("chosen", 1, (command,), ("chosen.json",))


def _throughput(sizes: Sizes) -> Stage:
    command = (
        "python", "throughput.py", "--sets", str(sizes.sets), "--out", "throughput/result.json",
    )  # fmt: skip
    return Stage("throughput", max(1, sizes.answer_minutes // 2), (command,), ("result.json",))


def _report() -> Stage:
    return Stage("report", 1, (("python", "report.py", "--out", "report"),), (".",))
