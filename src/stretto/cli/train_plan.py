"""What `train prefer` was asked for: checked at once, and held to by the run's folder."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli import train_judge
from stretto.cli.train_parts import is_first
from stretto.cli.train_sampler import folder_of, sampler_of
from stretto.errors import InvalidInput, Unsupported
from stretto.files import write_atomically
from stretto.models.weights import is_adapter, read_header, weight_files

if TYPE_CHECKING:
    from stretto.data.select import Selection
    from stretto.eval.judges import JudgeSettings
    from stretto.train.lora import Lora
    from stretto.train.prefer_run import PreferSettings

SETTINGS = "prefer.run.json"
COSTS = ("requests", "pool_slots")
"""Settings of sampling that change how long it takes and not what comes out."""


@dataclass(frozen=True)
class Sampling:
    """How a round samples, at temperature 1."""

    n: int
    max_tokens: int
    requests: int
    pool_slots: int
    dtype: str
    engine: str
    keeps_prompts: bool


@dataclass(frozen=True)
class Plan:
    """What `train prefer` was asked for. `given`: answers, scored answers and pairs that round 1
    begins with, each of which may be missing. `lora` None: full training."""

    out: Path
    start: str
    rounds: int
    given: tuple[tuple[Path, ...], Path | None, Path | None]
    prompts: tuple[Path, ...]
    prompt_field: str | None
    selection: Selection
    sampling: Sampling
    baseline: Path | None
    held_against: train_judge.HeldAgainst
    lam: str
    variant: str
    length_ratio: float | None
    judge: JudgeSettings | None
    settings: PreferSettings
    lora: Lora | None
    dtype: str
    device: str
    quiet: bool

    def folder(self, number: int) -> Path:
        """Of a round, counted from 1."""
        return self.out / f"round-{number}"

    def model(self, number: int) -> Path:
        return self.folder(number) / "model"

    def start_of(self, number: int) -> str:
        """The model that a round samples with and begins from."""
        return self.start if number == 1 else str(self.model(number - 1))

    def seed_of(self, number: int) -> int:
        """Of a round's sampling: no two rounds draw the same numbers."""
        return self.settings.seed + number - 1


def open_folder(plan: Plan) -> None:
    """Makes the folder, or checks that the same run was begun in it; more rounds may be added."""
    from stretto.data.settings import hold_to
    from stretto.train.environment import environment

    if is_first():
        hold_to(plan.out / SETTINGS, settings_of(plan), str(plan.out))
        facts = json.dumps(environment(plan.device), indent=2) + "\n"
        write_atomically(plan.out / "environment.json", facts.encode())


def settings_of(plan: Plan) -> dict[str, Any]:
    """All that decides what the rounds come to. Files and models are named by what is in them."""
    from stretto.models.fingerprint import fingerprint

    training = asdict(plan.settings)
    del training["checkpoint_every"]
    answers, scored, pairs = plan.given
    judge = plan.judge
    own = judge.references if judge and judge.references else ()
    references = [_hash(path) for path in (*plan.held_against.paths, *own)]
    return {
        "model": fingerprint(folder_of(plan.start)),
        "answers": [_hash(path) for path in answers],
        "scored": scored and _hash(scored),
        "pairs": pairs and _hash(pairs),
        "prompts": [_hash(path) for path in plan.prompts],
        "prompt_field": plan.prompt_field,
        "selection": asdict(plan.selection),
        "sampling": {k: v for k, v in asdict(plan.sampling).items() if k not in COSTS},
        "baseline": plan.baseline and _hash(plan.baseline),
        "references": references or None,
        "reference_field": plan.held_against.field or (judge and judge.reference_field),
        "lambda": plan.lam,
        "variant": plan.variant,
        "length_ratio": plan.length_ratio,
        "judge": judge and [judge.kind, judge.model],
        "expected": judge and judge.expected and _hash(judge.expected),
        "training": training,
        "lora": plan.lora and asdict(plan.lora),
        "dtype": plan.dtype,
    }


def _hash(path: Path) -> str:
    import hashlib

    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path") from None


def check(plan: Plan) -> None:
    """Raises for what would fail after hours: a missing input, a wrong number or name."""
    from stretto.errors import UnknownName
    from stretto.train.bonbon import margin_of
    from stretto.train.pairs import check_length_ratio
    from stretto.train.scores import VARIANTS, parse_lambda

    answers, scored, pairs = plan.given
    if plan.variant not in VARIANTS:
        raise UnknownName("variant", plan.variant, list(VARIANTS))
    check_length_ratio(plan.length_ratio)
    lam = parse_lambda(plan.lam)
    if lam > 0 and plan.judge is None and pairs is None:
        raise InvalidInput(f"lambda {plan.lam} needs a quality; name a judge, or --lambda 0")
    margin_of(plan.sampling.n)
    _check_training(plan)
    sampler_of(answers, plan.start)
    if (scored is not None or pairs is not None) and not answers:
        raise InvalidInput("scored answers or pairs come with their answers; name them (--answers)")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and (plan.rounds > 1 or pairs is None):
        raise Unsupported(
            "several processes can train on pairs but not sample or score; make the pairs first "
            "(data sample, train score, train pairs), then give --answers and --pairs"
        )
    if (plan.rounds > 1 or not answers) and not plan.prompts:
        raise InvalidInput("a round that samples needs prompts; name their data (--prompts)")
    if plan.baseline is None and (plan.rounds > 1 or (scored is None and pairs is None)):
        raise InvalidInput("speedup is counted from a baseline's answers; name them (--baseline)")


def _check_training(plan: Plan) -> None:
    settings = plan.settings
    if not 0 <= settings.alpha <= 1:
        raise InvalidInput(f"--alpha must be from 0 to 1, got {settings.alpha}")
    if settings.margin is not None and not math.isfinite(settings.margin):
        raise InvalidInput(f"--margin must be a number, got {settings.margin}")
    for name, value in (("epochs", settings.epochs), ("max-grad-norm", settings.max_grad_norm)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidInput(f"--{name} must be a number above 0, got {value}")
    if plan.dtype == "int8":
        raise Unsupported(
            "weights of int8 can sample (--sample-dtype) but not be trained; take --dtype bfloat16"
        )
    folder = folder_of(plan.start)
    if plan.lora is not None and not is_adapter(folder):
        names = (name for path in weight_files(folder) for name in read_header(path))
        plan.lora.check_layers({name.split(".")[-2] for name in names if name.count(".") > 1})
