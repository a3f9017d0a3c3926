"""The settings of a GRPO run: from a TOML file, flags, or Python. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stretto.models.embedded import EMBEDDED_MODEL
from stretto.params import MAX_SEED
from stretto.train.config import read_config

COSTS = frozenset({"requests", "pool_slots", "engine", "checkpoint_every", "pack_tokens"})
"""Settings that change how long a run takes; what it comes to differs by rounding alone."""

LR = {"full": 1e-6, "lora": 1e-5}


class GrpoConfig(BaseModel):
    """All settings of `stretto train grpo`. Unknown ones are refused.

    A step draws `samples` answers to each of `prompts_per_step` problems, and makes `inner` times
    `minibatches` updates on them. `kv_*` and `scale` are `RewardSettings`; `clip`, `clip_high`,
    `beta`, `aggregation` are `LossSettings`. `architecture`: a model's config, for estimates
    without its weights; a recipe has it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = EMBEDDED_MODEL
    out: str | None = None

    task: str = "exact"
    prompts: list[str] = Field(default_factory=list)
    prompt_field: str | None = None
    reference_field: str | None = None
    split: str = ""
    sizes: str | None = None
    limit: int | None = Field(default=None, ge=1)
    task_seed: int = 0
    valid: list[str] = Field(default_factory=list)
    valid_split: str = ""
    valid_limit: int | None = Field(default=None, ge=1)

    steps: int = Field(default=50, ge=1)
    prompts_per_step: int = Field(default=16, ge=1)
    samples: int = Field(default=8, ge=2)
    max_tokens: int = Field(default=512, ge=1)
    requests: int | None = Field(default=None, ge=1)
    pool_slots: int | None = Field(default=None, ge=2)
    engine: str = "auto"

    kv_weight: float = Field(default=0.0, ge=0, lt=math.inf)
    reward: Literal["separate", "r1", "r2", "r3"] = "separate"
    kv_measure: str | int = "cost"
    kv_free: float = Field(default=0.0, ge=0, lt=math.inf)
    kv_length: int | None = Field(default=None, ge=1)
    kv_tokens: Literal["all", "control"] = "all"
    scale: Literal["none", "group", "batch"] = "batch"

    clip: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float | None = Field(default=None, gt=0, lt=math.inf)
    beta: float = Field(default=0.0, ge=0, lt=math.inf)
    aggregation: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    inner: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)
    pack_tokens: int = Field(default=8192, ge=1)

    how: Literal["lora", "full"] = "lora"
    rank: int = Field(default=4, ge=1)
    alpha: float | None = Field(default=None, gt=0, lt=math.inf)
    targets: str = "all"
    lr: float | None = Field(default=None, gt=0, lt=math.inf)
    schedule: Literal["linear", "cosine", "constant"] = "constant"
    warmup: float = Field(default=0.0, ge=0, lt=math.inf)
    weight_decay: float = Field(default=0.0, ge=0, lt=math.inf)
    max_grad_norm: float = Field(default=1.0, gt=0)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = "cpu"
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    valid_every: int | None = Field(default=None, ge=1)
    valid_tolerance: float = Field(default=0.01, ge=0, le=1)
    checkpoint_every: int = Field(default=5, ge=1)
    architecture: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.valid and self.valid_split:
            raise ValueError("valid and valid_split are both given; leave one out")
        if self.valid_every is not None and not (self.valid or self.valid_split):
            raise ValueError("valid_every needs problems to validate on: valid or valid_split")
        self.rewards()
        return self

    @classmethod
    def read(cls, file: Path | None, changes: Mapping[str, Any]) -> GrpoConfig:
        """A TOML file's settings with `changes` over them; None changes nothing.

        Raises `InvalidInput` naming the file and the first setting that is wrong.
        """
        either = (("valid", "valid_split"),)
        return read_config(cls, file, changes, either=either, verb="grpo")

    def rewards(self) -> Any:
        """The `RewardSettings`. Raises `ValueError` for what does not go together."""
        from stretto.errors import InvalidInput
        from stretto.train.grpo_advantages import RewardSettings

        measure = self.kv_measure
        if isinstance(measure, str) and re.fullmatch(r"[0-9]{1,18}", measure):
            measure = int(measure)
        try:
            return RewardSettings(
                weight=self.kv_weight,
                form=self.reward,
                free=self.kv_free,
                measure=measure,
                length=self.kv_length,
                scale=self.scale,
            )
        except InvalidInput as error:
            raise ValueError(str(error)) from None

    @property
    def learning_rate(self) -> float:
        return LR[self.how] if self.lr is None else self.lr

    @property
    def resolved(self) -> dict[str, Any]:
        """All settings that a result depends on, for the run's folder."""
        return self.model_dump(exclude={"out", "architecture", *COSTS})
