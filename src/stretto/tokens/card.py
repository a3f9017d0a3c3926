"""`stretto.json`: which dialect a model writes, with which control ids and positions."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from tokenizers import Tokenizer

from stretto.dialects import get_dialect
from stretto.dialects.registers import DEFAULT_REGISTERS, MAX_REGISTERS
from stretto.errors import InvalidInput
from stretto.files import parse_json, write_atomically
from stretto.tokens.control import control_content

if TYPE_CHECKING:
    from stretto.methods.diffusion import Window

CARD = "stretto.json"
FORMAT: Final = 1
MAX_ID: Final = 2**31 - 1


class ModelCard(BaseModel):
    """What a folder of weights needs besides transformers' files. Values are checked at once.

    `control`: each of the dialect's control tokens to its id. `tokens`: the strings that the
    tokenizer has at those ids; a control id not named there is a row beyond the tokenizer.
    `unit`: tokens that a promise's number counts. `policy` and `fixed_length`: positions, as the
    dialect defines them. `num_registers` and `grace`: of a dialect with registers. `variant` and
    `convention`: of a dialect that has them, which must be named. `window` and `block`: the model
    was trained to answer without a plan, in one block of `window` tokens, or in such of `block` one
    after the other; without them it was trained to plan. `notes`: free text for people.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = FORMAT
    dialect: str = "plain"
    control: dict[str, int] = Field(default_factory=dict)
    tokens: dict[str, str] = Field(default_factory=dict)
    unit: int = Field(default=10, ge=1, le=2048)
    policy: Literal["predicted", "overlap", "fixed"] = "predicted"
    fixed_length: int = Field(default=50, ge=1, le=2048)
    num_registers: int = Field(default=DEFAULT_REGISTERS, ge=1, le=MAX_REGISTERS)
    grace: bool = False
    variant: Literal["sparse", "dense"] | None = None
    convention: Literal["shifted", "aligned"] | None = None
    window: int | None = Field(default=None, ge=1)
    block: int | None = Field(default=None, ge=1)
    notes: str = ""

    @model_validator(mode="after")
    def _names_belong_to_the_dialect(self) -> Self:
        try:
            names = set(get_dialect(self.dialect).forms(self))
        except InvalidInput as error:
            raise ValueError(str(error)) from None
        if missing := sorted(names - set(self.control)):
            raise ValueError(f"dialect {self.dialect} lacks control {', '.join(missing)}")
        if extra := sorted({*self.control, *self.tokens} - names):
            raise ValueError(f"dialect {self.dialect} has no control {', '.join(extra)}")
        if len(set(self.control.values())) < len(self.control):
            raise ValueError("two control tokens have the same id")
        if any(i < 0 for i in self.control.values()):
            raise ValueError("a control id is negative")
        if any(i > MAX_ID for i in self.control.values()):
            raise ValueError(f"a control id is above {MAX_ID}")
        self._check_choice("variant", self.variant, get_dialect(self.dialect).variants)
        self._check_choice("convention", self.convention, get_dialect(self.dialect).conventions)
        self._check_window()
        return self

    def _check_window(self) -> None:
        if self.window is not None and not get_dialect(self.dialect).variants:
            raise ValueError(f"dialect {self.dialect} writes no blocks, so it has no window")
        if self.block is not None and self.window is None:
            raise ValueError(f"block {self.block} is the part of a window, and there is none")
        try:
            _ = self.own_window
        except InvalidInput as error:
            raise ValueError(str(error)) from None

    @property
    def own_window(self) -> Window | None:
        """What the model was trained to answer in; None if it plans, or writes no blocks."""
        from stretto.methods.diffusion import Window

        return None if self.window is None else Window.of(self.window, self.block)

    def _check_choice(self, name: str, value: str | None, known: tuple[str, ...]) -> None:
        if value is not None and not known:
            raise ValueError(f"dialect {self.dialect} has no {name} {value!r}")
        if value is None and known:
            raise ValueError(f"dialect {self.dialect} needs a {name}: {' or '.join(known)}")

    @classmethod
    def describe(
        cls, dialect: str, control: Mapping[str, int], tokenizer: Tokenizer, **settings: Any
    ) -> ModelCard:
        """The card of a model whose tokenizer holds (or lacks) the ids of `control`.

        `settings` are other fields; a variant and convention that are not given are the first of
        the dialect's. Raises `InvalidInput` for values that do not fit together.
        """
        words = {name: tokenizer.id_to_token(i) for name, i in control.items() if 0 <= i <= MAX_ID}
        tokens = {name: word for name, word in words.items() if word is not None}
        known = get_dialect(dialect)
        defaults = {
            name: values[0]
            for name, values in (("variant", known.variants), ("convention", known.conventions))
            if values
        }
        fields = {
            "dialect": dialect, "control": dict(control), "tokens": tokens, **defaults, **settings
        }  # fmt: skip
        return cls._checked(fields, "model card")

    @classmethod
    def load(cls, folder: Path) -> ModelCard:
        """The card in a model's folder; that of a plain model if there is none.

        Raises `InvalidInput`, on one line with the file's path, for a card that is not valid.
        """
        path = folder / CARD
        try:
            content = parse_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} is unreadable: {error}") from None
        if not isinstance(content, dict):
            raise InvalidInput(f"{path} holds a {type(content).__name__}, not an object")
        if content.get("format") != FORMAT or isinstance(content["format"], bool):
            found = repr(content["format"]) if "format" in content else "no format"
            raise InvalidInput(f"{path} has {found}; this version reads format {FORMAT}")
        return cls._checked(content, str(path))

    def save(self, folder: Path) -> Path:
        """Write the card into a folder, whole or not at all; return its path."""
        path = folder / CARD
        write_atomically(path, (self.model_dump_json(indent=2) + "\n").encode())
        return path

    def check_tokenizer(self, tokenizer: Tokenizer, source: Path | str) -> None:
        """Raise `InvalidInput` unless `tokenizer` has this card's strings at its control ids.

        `source` is the card's path or name, for the message.
        """
        for name, i in self.control.items():
            found, expected = tokenizer.id_to_token(i), self.tokens.get(name)
            if found != expected:
                raise InvalidInput(
                    f"{source}: control {name!r} has id {i}, where the tokenizer has"
                    f" {found!r} instead of {expected!r}; they are of different models"
                )
            elsewhere = tokenizer.token_to_id(control_content(name))
            if elsewhere not in (None, i):
                raise InvalidInput(
                    f"{source}: control {name!r} has id {i}, but the tokenizer has"
                    f" {control_content(name)!r} at {elsewhere}; they are of different models"
                )

    @classmethod
    def _checked(cls, fields: dict[str, Any], source: str) -> ModelCard:
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise InvalidInput(f"{source}: {_one_line(error, list(cls.model_fields))}") from None


def _one_line(error: ValidationError, known: list[str]) -> str:
    """The first problem of a card, with its place and value."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(place, known, n=1)
        return f"unknown field {place!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    message = first["msg"].removeprefix("Value error, ")
    return f"{place} is {first['input']!r}: {message}" if place else message
