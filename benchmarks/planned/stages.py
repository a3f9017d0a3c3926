"""The stages of the planned experiment: which commands, how large, and what is kept of each."""

from __future__ import annotations

from dataclasses import dataclass

from cells import ARMS, COMPUTE_ARMS, Arm

from stretto.bench.stages import Command, Stage

FILES = ("model", "metrics.jsonl", "summary.json", "config.json", "environment.json")


@dataclass(frozen=True)
class Sizes:
    """How much of everything. `train`: problems, gone through `epochs` times; `shares` of these for
    arms that learn from less. `test`: problems, `a_stage` of them in each stage of answers. The
    estimates are of two cores."""

    shape: str
    train: int
    epochs: float
    shares: tuple[str, ...]
    test: int
    a_stage: int
    batch: int = 16
    lr: float = 2e-3
    seed: int = 0
    train_minutes: int = 35
    answer_minutes: int = 30


NORMAL = Sizes("tiny-1m", 12000, 3, ("0.25", "0.5"), test=100, a_stage=25)
FULL = Sizes("tiny-2m", 24000, 3, ("0.125", "0.25", "0.5"), test=300, a_stage=25)
QUICK = Sizes(
    "tiny-1m", 24, 1, ("0.5",), test=2, a_stage=1, batch=8, train_minutes=1, answer_minutes=2
)


def stages_of(sizes: Sizes) -> list[Stage]:
    """All stages, in an order in which each finds what it reads."""
    return [
        _data(sizes),
        *(_train(sizes, name, arm, sizes.epochs) for name, arm in ARMS.items()),
        *(
            _train(sizes, f"{name}-{share}", ARMS[name], sizes.epochs * float(share))
            for share in sizes.shares
            for name in COMPUTE_ARMS
        ),
        *_answers(sizes),
        _report(),
    ]


def _data(sizes: Sizes) -> Stage:
    command = (
        "python", "prepare.py", "--num", str(sizes.train), "--shape", sizes.shape,
        "--seed", str(sizes.seed), "--out", "data",
    )  # fmt: skip
    return Stage("data", min(5, sizes.train_minutes), (command,))


def _train(sizes: Sizes, name: str, arm: Arm, epochs: float) -> Stage:
    command = (
        "stretto", "train", "sft", "--model", f"data/start-{arm.start}",
        "--data", f"data/{arm.rows}.jsonl", *arm.options,
        "--full", "--dtype", "float32", "--schedule", "cosine", "--lr", str(sizes.lr),
        "--batch", str(sizes.batch), "--epochs", f"{epochs:g}", "--seed", str(sizes.seed),
        "--pack-tokens", "4096", "--checkpoint-every", "100", "--out", name,
    )  # fmt: skip
    share = epochs / sizes.epochs
    return Stage(name, max(1, round(sizes.train_minutes * share)), (command,), FILES)


def _answers(sizes: Sizes) -> list[Stage]:
    """Some problems a stage, in all ways; then all in the plain ways of arms that learnt less."""
    stages = []
    for number, first in enumerate(range(0, sizes.test, sizes.a_stage)):
        count = min(sizes.a_stage, sizes.test - first)
        stages.append(_asked(sizes, f"part-{number}", "knobs", first, count))
    for share in sizes.shares:
        stages.append(_asked(sizes, f"compute-{share}", f"compute={share}", 0, sizes.test))
    return stages


def _asked(sizes: Sizes, name: str, cells: str, first: int, num: int) -> Stage:
    command: Command = (
        "python", "answers.py", "--cells", cells, "--first", str(first), "--num", str(num),
        "--out", f"answers/{name}.jsonl",
    )  # fmt: skip
    kept = (f"{name}.jsonl",)
    return Stage(f"answers-{name}", sizes.answer_minutes, (command,), kept, "answers")


def _report() -> Stage:
    return Stage("report", 1, (("python", "report.py", "--out", "report"),), (".",))
