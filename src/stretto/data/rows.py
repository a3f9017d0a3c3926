"""Rows of data files: what a line holds, how rows are named, how a prompt is found by its hash.

Files are JSONL. A row names its prompt by `prompt_id`; a file that may be published leaves the
prompt's text out, and whoever reads it brings a `PromptBook` of the original data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from stretto.errors import InvalidInput
from stretto.files import parse_json

PROMPT_FIELDS = ("prompt", "instruction", "question", "problem")
RESPONSE_FIELDS = ("response", "answer", "output", "solution")


def prompt_id(prompt: str) -> str:
    """The name of a prompt: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Row(BaseModel):
    """A line of one of our files. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: ClassVar[str]

    @property
    def key(self) -> str:
        """What makes this row one of its file: a second row of that key is a repetition."""
        raise NotImplementedError


class Answer(Row):
    """A response that a model sampled.

    `ids`: the response's tokens in document order (`Trace.response`), each child right after the
    segment that forked it, control tokens and injected ones included, no end of sequence.
    `origins`: one letter a token: s sampled, f forced, i injected, p placed by a method.
    `logprobs`: of each token under the automaton's mask at temperature 1, null where it was not
    drawn. `text`: rendered.
    """

    kind: ClassVar[str] = "answer"
    prompt_id: str
    sample: int = 0
    prompt: str | None = None
    text: str
    finish_reason: str
    ids: list[NonNegativeInt]
    origins: str = Field(pattern="^[sfip]*$")
    logprobs: list[float | None] | None = None
    num_prompt_tokens: int
    sequential_steps: int
    completion_tokens: int
    control_tokens: int

    @model_validator(mode="after")
    def _one_of_each_a_token(self) -> Self:
        for name, values in (("origins", self.origins), ("logprobs", self.logprobs)):
            if values is not None and len(values) != len(self.ids):
                raise ValueError(f"{len(values)} {name} for {len(self.ids)} ids")
        return self

    @property
    def key(self) -> str:
        return f"{self.prompt_id}/{self.sample}"


class Annotated(Row):
    """A response with annotations. `strip(annotated) == response` byte for byte.

    `details`: what the annotator measured or was told, any JSON.
    """

    kind: ClassVar[str] = "annotated"
    prompt_id: str
    sample: int = 0
    prompt: str | None = None
    response: str
    annotated: str
    annotator: str
    details: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.prompt_id}/{self.sample}"


class Reject(Row):
    """A row that could not be used, and why.

    `reasons`: each `code: what and where`. `response_id`: the `prompt_id` of the response that was
    to be annotated. `text`: what an annotator wrote.
    """

    kind: ClassVar[str] = "reject"
    prompt_id: str
    sample: int = 0
    response_id: str | None = None
    reasons: list[str]
    text: str | None = None

    @property
    def key(self) -> str:
        return f"{self.prompt_id}/{self.sample}"


class Source(BaseModel):
    """A prompt, maybe with a response, from a user's file.

    `fields`: what the line has of the other fields that were asked for; the rest is ignored.
    """

    model_config = ConfigDict(frozen=True)
    prompt: str
    response: str | None = None
    name: str
    """Where it stands: FILE:LINE, for messages."""
    fields: dict[str, Any] = Field(default_factory=dict)

    @property
    def prompt_id(self) -> str:
        return prompt_id(self.prompt)


R = TypeVar("R", bound=Row)


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a JSONL file with their line numbers, from 1; blank lines are skipped.

    Raises `InvalidInput`, with file and line, for what is no object or cannot be read, and says so
    of a last line that a kill has cut off.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path") from None
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            raise InvalidInput(
                f"{path}:{number} is no JSON: the file's last line is cut off; run what writes it "
                "again, or take the line out"
                if number == len(lines) and line.startswith(b"{")
                else f"{path}:{number} is no JSON: {error}"
            ) from None
        if not isinstance(value, dict):
            raise InvalidInput(f"{path}:{number} is a {type(value).__name__}, not an object")
        yield number, value


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong with a row: field, if it is about one, and reason."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    return f"{place}: {reason}" if place else reason


def read_rows(path: Path, kind: type[R]) -> list[R]:
    """All rows of one of our files. Raises `InvalidInput` naming file, line and field."""
    rows = []
    for number, value in read_lines(path):
        try:
            rows.append(kind.model_validate(value))
        except ValidationError as error:
            raise InvalidInput(
                f"{path}:{number} is no {kind.kind} row: {first_fault(error)}"
            ) from None
    return rows


def read_sources(
    paths: Sequence[Path],
    *,
    prompt_field: str | None = None,
    response_field: str | None = None,
    keep_fields: Sequence[str] = (),
) -> list[Source]:
    """Prompts (and responses) of users' JSONL files, in order, repeated prompts included.

    Without a field's name the first of `PROMPT_FIELDS` (`RESPONSE_FIELDS`) that a line has is
    taken. A response that is a whole number is its digits. Raises `InvalidInput` for a line without
    a prompt, or without the named response.
    """
    sources = []
    for path in paths:
        for number, value in read_lines(path):
            name = f"{path}:{number}"
            prompt = _field(value, prompt_field, PROMPT_FIELDS)
            if prompt is None or not prompt.strip():
                wanted = prompt_field or " or ".join(PROMPT_FIELDS)
                raise InvalidInput(f"{name} has no text in field {wanted}; name it with an option")
            numbers = {k: str(v) for k, v in value.items() if type(v) is int}
            response = _field(value | numbers, response_field, RESPONSE_FIELDS)
            if response is None and response_field is not None:
                raise InvalidInput(f"{name} has no text in field {response_field}")
            fields = {field: value[field] for field in keep_fields if field in value}
            sources.append(Source(prompt=prompt, response=response, name=name, fields=fields))
    return sources


def _field(value: dict[str, Any], name: str | None, known: Iterable[str]) -> str | None:
    names = (name,) if name is not None else tuple(known)
    return next((value[n] for n in names if isinstance(value.get(n), str)), None)


class PromptBook:
    """Prompts by their `prompt_id`, from the original data."""

    def __init__(self, prompts: Iterable[str] = ()) -> None:
        self._prompts = {prompt_id(prompt): prompt for prompt in prompts}

    @classmethod
    def read(cls, paths: Sequence[Path], *, prompt_field: str | None = None) -> Self:
        return cls(s.prompt for s in read_sources(paths, prompt_field=prompt_field))

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt_of(self, row: Answer | Annotated) -> str:
        """A row's prompt, its own or from the book. Raises `InvalidInput` if neither has it, or if
        its own is not the one that the row is named after."""
        if row.prompt is not None:
            if (name := prompt_id(row.prompt)) != row.prompt_id:
                raise InvalidInput(
                    f"row {row.key} has a prompt whose id is {name}; rows are not made by hand"
                )
            return row.prompt
        if row.prompt_id not in self._prompts:
            raise InvalidInput(
                f"prompt {row.prompt_id} is in no file given; name the data it came from "
                "(--prompts)"
            )
        return self._prompts[row.prompt_id]
