"""The stages of the planned experiment: which commands, how large, and what is kept of each."""

from __future__ import annotations

from dataclasses import dataclass

from cells import ARMS, COMPUTE_ARMS, Arm

from stretto.bench.stages import Command, Stage

CHOSEN = "chosen/chosen.json"
FILES = ("model", "metrics.jsonl", "summary.json", "config.json", "environment.json")


@dataclass(frozen=True)
class Sizes:
    """How much of everything. `train`: problems, gone through `epochs` times; `shares` of these for
    arms that learn from less. `valid`: problems that ways are chosen on. `test`: problems, answered
    in all ways, `a_stage` of them in each stage; `more`: further ones, in the ways alone that are
    chosen. `sets`: of eight problems each, answered at once and one by one. The estimates are of
    two cores: `train_minutes` of the reference, `answer_minutes` of a stage in all ways."""

    shape: str
    train: int
    epochs: float
    shares: tuple[str, ...]
    valid: int
    test: int
    a_stage: int
    more: int
    sets: int
    batch: int = 16
    lr: float = 2e-3
    seed: int = 0
    train_minutes: int = 9
    answer_minutes: int = 20


NORMAL = Sizes("tiny-1m", 12000, 2, ("0.5",), valid=40, test=100, a_stage=50, more=900, sets=15)
FULL = Sizes(
    "tiny-1m", 12000, 4, ("0.125", "0.25", "0.5"), valid=100, test=300, a_stage=100, more=1700,
    sets=15, train_minutes=18, answer_minutes=40,
)  # fmt: skip
QUICK = Sizes(
    "tiny-1m", 24, 1, ("0.5",), valid=1, test=1, a_stage=1, more=1, sets=1, batch=8,
    train_minutes=0, answer_minutes=1,
)  # fmt: skip


def stages_of(sizes: Sizes) -> list[Stage]:
    """All stages, in an order in which each finds what it reads."""
    return [
        _data(sizes),
        *(_train(sizes, name, arm, sizes.epochs * arm.epochs) for name, arm in ARMS.items()),
        *(
            _train(sizes, f"{name}-{share}", ARMS[name], sizes.epochs * float(share))
            for share in sizes.shares
            for name in COMPUTE_ARMS
        ),
        _asked(sizes, "valid", "knobs", _of("valid", 0, sizes.valid)),
        _choice(),
        *_answers(sizes),
        _throughput(sizes),
        _report(),
    ]


def _data(sizes: Sizes) -> Stage:
    command = (
        "python", "prepare.py", "--num", str(sizes.train), "--shape", sizes.shape,
        "--seed", str(sizes.seed), "--out", "data",
    )  # fmt: skip
    return Stage("data", max(1, sizes.train // 4000), (command,))


def _train(sizes: Sizes, name: str, arm: Arm, epochs: float) -> Stage:
    command = (
        "stretto", "train", "sft", "--model", f"data/start-{arm.start}",
        "--data", f"data/{arm.rows}.jsonl", *arm.options,
        "--full", "--dtype", "float32", "--schedule", "cosine", "--lr", str(sizes.lr),
        "--batch", str(sizes.batch), "--epochs", f"{epochs:g}", "--seed", str(sizes.seed),
        "--pack-tokens", "4096", "--checkpoint-every", "100", "--out", name,
    )  # fmt: skip
    minutes = sizes.train_minutes * arm.cost * epochs / sizes.epochs
    return Stage(name, max(1, round(minutes)), (command,), FILES)


def _answers(sizes: Sizes) -> list[Stage]:
    """Some problems a stage, in all ways; then more in the chosen ways; then those in all ways
    again, in the plain ways of arms that learnt less."""
    stages = []
    for number, first in enumerate(range(0, sizes.test, sizes.a_stage)):
        count = min(sizes.a_stage, sizes.test - first)
        stages.append(_asked(sizes, f"part-{number}", "knobs", _of("test", first, count)))
    more = _of("test", sizes.test, sizes.more)
    stages.append(_asked(sizes, "more", f"chosen={CHOSEN}", more))
    for share in sizes.shares:
        same = _of("test", 0, sizes.test)
        stages.append(_asked(sizes, f"compute-{share}", f"compute={share}", same))
    return stages


def _of(split: str, first: int, num: int) -> Command:
    return ("--split", split, "--first", str(first), "--num", str(num))


def _asked(sizes: Sizes, name: str, cells: str, problems: Command) -> Stage:
    out = f"answers/{name}.jsonl"
    command = ("python", "answers.py", "--cells", cells, *problems, "--out", out)
    kept = (f"{name}.jsonl",)
    minutes = sizes.answer_minutes if cells == "knobs" else max(1, sizes.answer_minutes // 2)
    return Stage(f"answers-{name}", minutes, (command,), kept, "answers")


def _choice() -> Stage:
    command = ("python", "choose.py", "--answers", "answers/valid.jsonl", "--out", CHOSEN)
    return Stage("chosen", 1, (command,), ("chosen.json",))


def _throughput(sizes: Sizes) -> Stage:
    command = (
        "python", "throughput.py", "--sets", str(sizes.sets), "--out", "throughput/result.json",
    )  # fmt: skip
    return Stage("throughput", max(1, sizes.answer_minutes // 2), (command,), ("result.json",))


def _report() -> Stage:
    return Stage("report", 1, (("python", "report.py", "--out", "report"),), (".",))
