"""What a run's `config.json` must hold: a file that somebody has changed is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.data.rows import first_fault
from stretto.errors import InvalidInput

DEFAULTS: dict[str, dict[str, Any]] = {
    "task": {"size": "", "has_votes": False},
    "sampling": {"top_p": 1.0, "repetition_penalty": 1.0, "samples": 1},
    "place": {"page_size": 1},
}
"""What settings from before there was a choice stand for."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Task(_Part):
    name: str
    version: int
    has_scores: bool
    has_votes: bool
    num_prompts: int = Field(ge=1)
    left_out: dict[str, int]
    digest: str
    prompt_field: str | None
    reference_field: str | None
    limit: int | None
    split: str
    skip_if: list[str]
    size: str


class _Side(_Part):
    model: str
    method: str
    fingerprint: str | None
    dialect: str
    scored_by: list[str]


class _Sampling(_Part):
    max_tokens: int
    temperature: float
    top_p: float
    repetition_penalty: float
    seed: int = Field(ge=0)
    samples: int = Field(ge=1)


class _Place(_Part):
    page_size: int = Field(ge=1)


class _Config(_Part):
    task: _Task
    ours: _Side
    baseline: _Side | None
    sampling: _Sampling
    place: _Place
    pairs: int = Field(ge=0)


def checked(config: Any, path: Path) -> dict[str, Any]:
    """A run's settings as read from `path`, with `DEFAULTS` where they are older than those. Raises
    `InvalidInput` naming the first that cannot be."""
    if isinstance(config, dict):
        there = {key: known for key, known in DEFAULTS.items() if key in config}
        config = config | {key: _filled(config[key], known) for key, known in there.items()}
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        raise InvalidInput(
            f"{path} is not what stretto eval run writes ({first_fault(error)}); run it again with "
            "another --out"
        ) from None
    return dict(config)


def _filled(part: Any, known: dict[str, Any]) -> Any:
    return known | part if isinstance(part, dict) else part
