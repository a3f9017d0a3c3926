"""The parts of a GRPO run, as its settings ask for them: problems, the trainee, steps and loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import InvalidInput
from stretto.eval.tasks import Source
from stretto.tokens import ModelCard
from stretto.train.grpo import LossSettings
from stretto.train.grpo_config import GrpoConfig
from stretto.train.grpo_problems import Problems, load_problems
from stretto.train.grpo_steps import StepSettings
from stretto.train.loop import LoopSettings
from stretto.train.lora import Lora
from stretto.train.schedule import Schedule

if TYPE_CHECKING:
    from stretto.train.trainee import Trainee

REQUESTS = {"fused": 256}
OTHER_REQUESTS = 32
"""At once: engine `fused` reads only what a row sees, the others every slot of the pool."""


def requests_of(config: GrpoConfig, engine: str | None = None) -> int:
    """How many answers are under way at once; by default those of the engine that is likely."""
    if config.requests is not None:
        return config.requests
    if engine is None:
        likely = "fused" if config.device == "cpu" else "hf"
        engine = likely if config.engine == "auto" else config.engine
    return REQUESTS.get(engine, OTHER_REQUESTS)


def problems_of(config: GrpoConfig) -> tuple[Problems, Problems | None]:
    """The problems to train on and those to validate on. Raises `InvalidInput` where they meet, and
    for fewer problems than a step has."""
    source = _source(config, config.prompts, config.split, config.limit)
    problems = load_problems(config.task, source, config.sizes)
    if (num := len(problems.items)) < config.prompts_per_step:
        raise InvalidInput(
            f"a step has {config.prompts_per_step} problems and there are {num}; give more, or "
            f"--prompts-per-step {num}"
        )
    if not (config.valid or config.valid_split):
        return problems, None
    paths = config.valid or config.prompts
    source = _source(config, paths, config.valid_split, config.valid_limit)
    held_out = load_problems(config.task, source, config.sizes)
    both = {i.prompt_id for i in problems.items} & {i.prompt_id for i in held_out.items}
    if both:
        raise InvalidInput(
            f"{len(both)} problems are both trained and validated on, e.g. {min(both)}; give "
            "other files, or a split and a valid_split that do not meet"
        )
    return problems, held_out


def _source(config: GrpoConfig, paths: list[str], split: str, limit: int | None) -> Source:
    return Source(
        paths=tuple(Path(path).expanduser() for path in paths),
        prompt_field=config.prompt_field,
        reference_field=config.reference_field,
        limit=limit,
        seed=config.task_seed,
        split=split,
    )


def open_for(config: GrpoConfig) -> Trainee:
    """The trainee that a run's settings ask for: the model as it is, in its own dialect."""
    from stretto.models import resolve
    from stretto.train.trainee import open_trainee

    card = ModelCard.load(resolve(config.model).path)
    return open_trainee(
        config.model,
        dialect=card.dialect,
        how=config.how,
        lora=Lora(config.rank, config.alpha, config.targets),
        asked=sorted({"rank", "alpha", "targets"} & config.model_fields_set),
        dtype=config.dtype,
        device=config.device,
        seed=config.seed,
    )


def identity_of(
    config: GrpoConfig, problems: Problems, held_out: Problems | None
) -> dict[str, Any]:
    """What files hold: models and data are named by what is in them."""
    from stretto.models import resolve
    from stretto.models.fingerprint import fingerprint

    path = resolve(config.model).path
    return {
        "weights": fingerprint(path if path.is_dir() else path.parent),
        "problems": problems.digest,
        "valid_problems": None if held_out is None else held_out.digest,
    }


def step_settings(config: GrpoConfig) -> StepSettings:
    return StepSettings(
        num_steps=config.steps,
        prompts=config.prompts_per_step,
        samples=config.samples,
        inner=config.inner,
        minibatches=config.minibatches,
        pack_tokens=config.pack_tokens,
        seed=config.seed,
    )


def loss_settings(config: GrpoConfig) -> LossSettings:
    return LossSettings(
        max_tokens=config.max_tokens,
        clip_low=config.clip,
        clip_high=config.clip if config.clip_high is None else config.clip_high,
        beta=config.beta,
        aggregation=config.aggregation,
        kv_tokens=config.kv_tokens,
    )


def loop_settings(config: GrpoConfig, identity: Mapping[str, Any]) -> LoopSettings:
    updates = config.inner * config.minibatches
    valid_every = None if config.valid_every is None else config.valid_every * updates
    return LoopSettings(
        schedule=Schedule(config.learning_rate, config.schedule, config.warmup),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        valid_every=valid_every,
        checkpoint_every=config.checkpoint_every * updates,
        seed=config.seed,
        fingerprint=json.dumps({**config.resolved, **identity}, sort_keys=True),
    )
