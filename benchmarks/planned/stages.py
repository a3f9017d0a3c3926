"""The stages of the planned experiment: which commands, how large, and what is kept of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cells import ARMS, BASE, BASE_RUNS, COMPUTE_ARMS, REFERENCE, Arm, arm_of

from stretto.bench.stages import Command, Stage

CHOSEN = "chosen/chosen.json"
FILES = ("metrics.jsonl", "summary.json", "config.json", "environment.json")


@dataclass(frozen=True)
class Phase:
    """Some problems of so many `parts`, and how they are learnt from. `minutes`: about what it
    takes the reference on two cores, at some 15,000 tokens a second."""

    name: str
    parts: str
    num: int
    epochs: float
    batch: int
    lr: float
    minutes: float

    @property
    def text(self) -> str:
        return f"{self.name}:{self.parts}:{self.num}"


@dataclass(frozen=True)
class Sizes:
    """How much of everything. `base`: what the base learns, short problems and then whole ones;
    `own`: how each arm then learns the whole ones; `shares` of its epochs for arms that learn less.
    `valid`: problems that ways are chosen on. `test`: problems, answered in all ways, `a_stage` of
    them in each stage; `more`: further ones, in the ways alone that claims compare. `costly`: test
    problems that are answered at the cost of a larger model. `sets`: of eight problems each,
    answered at once and one by one. `answer_minutes`: about what a stage takes two cores to answer
    in all ways."""

    shape: str
    base: tuple[Phase, Phase]
    own: Phase
    shares: tuple[str, ...]
    valid: int
    test: int
    a_stage: int
    more: int
    costly: int
    sets: int
    seed: int = 0
    answer_minutes: int = 20


SHORT = Phase("short", "1-2", 20000, 1, 32, 4e-3, minutes=3)
"""From whole problems alone a model of this size learns their form, and not to work them out."""
WHOLE = Phase("whole", "4-5", 12000, 1, 16, 3e-3, minutes=5)
NORMAL = Sizes(
    "tiny-1m", (SHORT, WHOLE), replace(WHOLE, epochs=2, minutes=10), ("0.5",),
    valid=40, test=100, a_stage=50, more=900, costly=60, sets=15,
)  # fmt: skip
FULL = Sizes(
    "tiny-1m", (SHORT, WHOLE), replace(WHOLE, epochs=6, minutes=30), ("0.125", "0.25", "0.5"),
    valid=100, test=300, a_stage=100, more=1700, costly=100, sets=15, answer_minutes=40,
)  # fmt: skip
FEW = Phase("whole", "4-5", 16, 1, 8, 3e-3, minutes=0)
QUICK = Sizes(
    "tiny-1m", (Phase("short", "1-2", 16, 1, 8, 4e-3, minutes=0), FEW), FEW, ("0.5",),
    valid=1, test=1, a_stage=1, more=1, costly=1, sets=1, answer_minutes=1,
)  # fmt: skip


def stages_of(sizes: Sizes) -> list[Stage]:
    """All stages, in an order in which each finds what it reads."""
    return [
        _data(sizes),
        _base(sizes),
        *(_train(sizes, name, arm.epochs) for name, arm in ARMS.items()),
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
        *(part for phase in sizes.base for part in ("--phase", phase.text)),
        "--shape", sizes.shape, "--seed", str(sizes.seed), "--out", "data",
    )  # fmt: skip
    return Stage("data", max(1, sum(phase.num for phase in sizes.base) // 12000), (command,))


def _base(sizes: Sizes) -> Stage:
    commands, model = [], "data/start"
    for phase, out in zip(sizes.base, BASE_RUNS, strict=True):
        commands.append(_learn(sizes, ARMS[REFERENCE], phase, model=model, out=out))
        model = f"{out}/model"
    minutes = round(sum(phase.minutes for phase in sizes.base))
    first, _ = BASE_RUNS
    kept = ("model", *FILES, *(f"{first.partition('/')[2]}/{name}" for name in FILES))
    return Stage(BASE, max(1, minutes), tuple(commands), kept)


def _train(sizes: Sizes, run: str, times: float) -> Stage:
    """`times`: as many epochs."""
    arm, own = ARMS[arm_of(run)], sizes.own
    phase = replace(own, epochs=own.epochs * times, minutes=own.minutes * times)
    command = _learn(sizes, arm, phase, model=f"{BASE}/model", out=run)
    minutes = round(phase.minutes * arm.cost)
    return Stage(run, max(1, minutes), (command,), ("model", *FILES))


def _learn(sizes: Sizes, arm: Arm, phase: Phase, *, model: str, out: str) -> Command:
    return (
        "stretto", "train", "sft", "--model", model,
        "--data", f"data/{phase.name}-{arm.rows}.jsonl", *arm.options,
        "--full", "--dtype", "float32", "--schedule", "cosine", "--lr", str(phase.lr),
        "--batch", str(phase.batch), "--epochs", f"{phase.epochs:g}",
        "--seed", str(sizes.seed), "--pack-tokens", "4096", "--checkpoint-every", "100",
        "--out", out,
    )  # fmt: skip


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
