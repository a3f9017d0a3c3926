"""The settings of a supervised run: from a TOML file, flags, or Python. Imports no torch."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stretto.dialects import get_dialect
from stretto.dialects.registers import MAX_REGISTERS
from stretto.errors import InvalidInput
from stretto.models.embedded import EMBEDDED_MODEL
from stretto.params import MAX_SEED

Config = TypeVar("Config", bound=BaseModel)
Init = Literal["forms", "mean", "random"]
"""What rows of new control tokens begin as."""

BLOCK_SETTINGS = (
    "variant", "convention", "plan_weight", "span_weight", "slack", "window", "block",
)  # fmt: skip
"""Settings of a dialect that writes spans as blocks."""

DEFAULT_SLACK = 0.1
"""How often a promise is a unit longer than written, while training."""


class SftConfig(BaseModel):
    """All settings of `stretto train sft`. Unknown ones are refused.

    `architecture`: a model's config, for estimates without its weights; a recipe has it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = EMBEDDED_MODEL
    out: str | None = None
    data: list[str] = Field(default_factory=list)
    prompts: list[str] = Field(default_factory=list)
    prompt_field: str | None = None
    valid: list[str] = Field(default_factory=list)
    valid_share: float = Field(default=0.0, ge=0, lt=1)

    dialect: str = "pasta"
    baseline: bool = False
    lengths: Literal["exact", "tens", "fixed", "overlap"] | None = None
    fixed_length: int = Field(default=50, ge=1, le=2048)
    registers: int | None = Field(default=None, ge=1, le=MAX_REGISTERS)
    grace: bool | None = None

    variant: Literal["sparse", "dense"] | None = None
    convention: Literal["shifted", "aligned"] | None = None
    plan_weight: float | None = Field(default=None, ge=0, lt=math.inf)
    span_weight: float | None = Field(default=None, ge=0, lt=math.inf)
    slack: float | None = Field(default=None, ge=0, le=0.9)
    window: int | None = Field(default=None, ge=1)
    block: int | None = Field(default=None, ge=1)

    how: Literal["lora", "full"] = "lora"
    rank: int = Field(default=4, ge=1)
    alpha: float | None = Field(default=None, gt=0, lt=math.inf)
    targets: str = "all"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    init: Init = "forms"

    lr: float = Field(default=1e-3, gt=0, lt=math.inf)
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: float = Field(default=0.03, ge=0, lt=math.inf)
    epochs: float = Field(default=1.0, gt=0, lt=math.inf)
    max_steps: int | None = Field(default=None, ge=1)
    batch: int | None = Field(default=None, ge=1)
    batch_tokens: int | None = Field(default=None, ge=1)
    pack_tokens: int = Field(default=2048, ge=1)
    max_tokens: int | None = Field(default=None, ge=2)
    weight_decay: float = Field(default=0.0, ge=0, lt=math.inf)
    max_grad_norm: float = Field(default=1.0, gt=0)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = "cpu"
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    valid_every: int | None = Field(default=None, ge=1)
    checkpoint_every: int = Field(default=50, ge=1)
    architecture: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.batch is not None and self.batch_tokens is not None:
            raise ValueError("batch and batch_tokens are both given; leave one out")
        if self.valid and self.valid_share:
            raise ValueError("valid and valid_share are both given; leave one out")
        if self.baseline and self.lengths is not None:
            raise ValueError("a baseline promises nothing, so it has no lengths")
        parts = self.dialect.split("+")
        writes_blocks = get_dialect(self.dialect).blocks is not None
        self._check_lengths(parts, writes_blocks)
        self._check_blocks(writes_blocks)
        asked = self.registers is not None or self.grace is not None
        if asked and (self.baseline or "tip" not in parts):
            what = "a baseline" if self.baseline else f"dialect {self.dialect}"
            raise ValueError(f"{what} has no registers, so neither registers nor grace is its own")
        return self

    def _check_lengths(self, parts: list[str], writes_blocks: bool) -> None:
        if self.lengths is None or "pasta" in parts:
            return
        if not writes_blocks:
            raise ValueError(f"dialect {self.dialect} promises nothing, so it has no lengths")
        if self.lengths != "tens":
            raise ValueError(
                f"lengths {self.lengths} is of dialect pasta; {self.dialect} has tens alone"
            )

    def _check_blocks(self, writes_blocks: bool) -> None:
        asked = [name for name in BLOCK_SETTINGS if getattr(self, name) is not None]
        if asked and (self.baseline or not writes_blocks):
            what = "a baseline" if self.baseline else f"dialect {self.dialect}"
            raise ValueError(f"{what} writes no spans, so {asked[0]} is not its own")
        if self.block is not None and self.window is None:
            raise ValueError("block is the part of a window; give window too")
        if self.window is None:
            return
        for name in ("lengths", "slack", "plan_weight"):
            if getattr(self, name) is not None:
                raise ValueError(f"in a window nothing is promised or planned: leave {name} out")

    @classmethod
    def read(cls, file: Path | None, changes: Mapping[str, Any]) -> SftConfig:
        """A TOML file's settings with `changes` over them; None changes nothing.

        Raises `InvalidInput` naming the file and the first setting that is wrong.
        """
        either = (("batch", "batch_tokens"), ("valid", "valid_share"))
        return read_config(cls, file, changes, either=either, verb="sft")

    @property
    def resolved(self) -> dict[str, Any]:
        """All settings that a result depends on, for the run's folder.

        Those of registers and spans are left out where they are not set: runs that were begun
        before there were any can go on.
        """
        names = ("registers", "grace", *BLOCK_SETTINGS)
        unset = {name for name in names if getattr(self, name) is None}
        return self.model_dump(exclude={"out", "architecture", *unset})


def read_config(
    kind: type[Config],
    file: Path | None,
    changes: Mapping[str, Any],
    *,
    either: Iterable[tuple[str, str]],
    verb: str,
) -> Config:
    """The settings of a verb of `stretto train`: a TOML file's with `changes` over them, of which
    None changes nothing. Of `either` two settings only one can be set: the one in `changes` takes
    the place of the other in the file. Raises as `checked`, and as `read_toml`."""
    settings = read_toml(file) if file is not None else {}
    own = {name: value for name, value in changes.items() if value is not None}
    for one, other in either:
        if one in own or other in own:
            settings = {k: v for k, v in settings.items() if k not in (one, other)}
    return checked(kind, {**settings, **own}, "settings" if file is None else str(file), verb)


def checked(kind: type[Config], settings: Mapping[str, Any], source: str, verb: str) -> Config:
    """The settings of one of `stretto train`'s verbs. Raises `InvalidInput` for the first that is
    wrong."""
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(place, list(kind.model_fields), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"see `stretto train {verb} --help`"
            raise InvalidInput(f"{source}: unknown setting {place!r}; {hint}") from None
        message = first["msg"].removeprefix("Value error, ")
        told = f"{place} is {first['input']!r}: {message}" if place else message
        raise InvalidInput(f"{source}: {told}") from None


def read_toml(file: Path) -> dict[str, Any]:
    """A file's settings. Raises `InvalidInput` for one that cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"no file {file}; name a TOML file of settings") from None
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}; check the path") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{file} is no TOML: {error}; correct it") from None
