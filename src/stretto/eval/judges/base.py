"""What a judge is: it measures answers to a prompt, or says which of two is better.

Measuring is what costs time or money, so it is apart from turning measurements into qualities:
measurements are kept, qualities are computed from all of them at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from stretto.errors import InvalidInput
from stretto.files import parse_json, write_atomically

PREFERENCE = "preference.json"
"""In the folder of a model that preference training made: who scored the answers it learnt from."""

Measure = dict[str, Any]
"""What a judge measured of one answer: any JSON, meant for the judge's own `qualities`."""


@dataclass(frozen=True)
class Question:
    """A prompt and answers to judge. `opponents`: answers by name ("baseline", "reference") that
    a judge which compares holds each candidate against; others ignore them."""

    prompt: str
    candidates: tuple[str, ...]
    opponents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Two answers to a prompt; which one is better?"""

    prompt: str
    a: str
    b: str


@dataclass(frozen=True)
class Verdict:
    """Which of two answers is better, and how sure the judge is: `confidence` from 0 to 1.

    A tie has confidence 0. `details`: what the judge measured or was told, any JSON.
    """

    winner: Literal["a", "b", "tie"]
    confidence: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def preference(self) -> float:
        """From -1 (b for sure) over 0 (no difference) to 1 (a for sure)."""
        return {"a": 1.0, "b": -1.0, "tie": 0.0}[self.winner] * self.confidence

    @classmethod
    def of(cls, preference: float, details: dict[str, Any]) -> Self:
        """The verdict with this `preference`; exactly 0 is a tie."""
        winner: Literal["a", "b", "tie"] = (
            "a" if preference > 0 else "b" if preference < 0 else "tie"
        )
        return cls(winner, abs(preference), details)


class Judge(Protocol):
    """Judges answers. Close it in the end."""

    @property
    def identity(self) -> str:
        """Kind, model and settings, in the form of `Identity`."""
        ...

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure] | None]:
        """Of each question in order, a measurement of each candidate in order; None for one that
        could not be measured now, and may be in a later run.

        Raises `data.annotators.Exhausted`, between two questions, if it can do no more in this run.
        """
        ...

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        """The quality of each candidate of each question, higher is better; None if there is
        none. Only differences between candidates of one question mean anything. A pure function
        of all that was measured."""
        ...

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """A verdict on each comparison in order; None where the judge gave none. Swapping a and b
        in all of them swaps the verdicts."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Identity:
    """A judge's name: `kind:model`, and after a `;` its settings as JSON with sorted keys."""

    kind: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = json.dumps(dict(self.settings), sort_keys=True, ensure_ascii=False)
        return f"{self.kind}:{self.model};{settings}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Settings may be left out. Raises `InvalidInput` for what is no identity.

        A model's name may have a `;` in it: settings begin after the first one that an object of
        JSON follows.
        """
        name = text
        settings: dict[str, Any] | None = None if ";" in text else {}
        for at in (found.start() for found in re.finditer(";", text)):
            if (value := _object(text[at + 1 :])) is not None:
                name, settings = text[:at], value
                break
        kind, colon, model = name.partition(":")
        if not colon or not kind or settings is None:
            raise InvalidInput(f"{text!r} is no judge's identity, such as 'llm:a-model;{{}}'")
        return cls(kind, model, settings)

    def is_same_judge(self, other: Identity) -> bool:
        """Whether both are one judge, whatever their settings. `likelihood` models are compared by
        their weights' fingerprint, after the `#`, if both have one."""
        mine, theirs = self.model.rpartition("#"), other.model.rpartition("#")
        both_marked = bool(mine[1]) and bool(theirs[1])
        same = mine[2] == theirs[2] if both_marked else self.model == other.model
        return self.kind == other.kind and same


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None for any other text."""
    try:
        value = parse_json(text.encode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def check_different(scored_by: str | Iterable[str], reported_by: str) -> None:
    """Raises `InvalidInput` if the judge that reports is one that scored the training answers.

    Both are identities; settings do not matter: one model with another temperature is still the
    same judge. Kind `exact` is exempt: whether a number is right is a fact, not an opinion.
    """
    reporter = Identity.parse(reported_by)
    if reporter.kind == "exact":
        return
    for text in [scored_by] if isinstance(scored_by, str) else scored_by:
        if reporter.is_same_judge(Identity.parse(text)):
            raise InvalidInput(
                f"judge {reporter.kind}:{reporter.model} scored the answers this model was trained "
                "on, so its report would be biased; report with another judge"
            )


def judges_of(folder: Path) -> list[str]:
    """The identities of the judges that scored what the model in `folder` learnt from, oldest
    first; none for a model without preference training. An adapter's base learnt from some, too.

    Raises `InvalidInput` for a file that does not say it, or an adapter without its base.
    """
    from stretto.models.weights import is_adapter

    before = judges_of(_base_of(folder)) if is_adapter(folder) else []
    return list(dict.fromkeys([*before, *_named_in(folder / PREFERENCE)]))


def write_judges(folder: Path, judges: Sequence[str], notes: Mapping[str, Any]) -> None:
    """Says in a model's folder who scored what it learnt from; `notes` are for people."""
    content = {"scored_by": list(dict.fromkeys(judges)), **notes}
    write_atomically(folder / PREFERENCE, (json.dumps(content, indent=2) + "\n").encode())


def keep_judges(source: Path, folder: Path) -> None:
    """Says in the folder of a model made of the one in `source` who scored what that one learnt
    from, if anybody did."""
    if judges := judges_of(source):
        write_judges(folder, judges, {})


def _base_of(folder: Path) -> Path:
    from stretto.models import resolve
    from stretto.models.adapters import base_of

    return base_of(folder, lambda name: resolve(name, offline=True)).path


def _named_in(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        value = parse_json(path.read_bytes())
        judges = value["scored_by"]
    except (OSError, ValueError, KeyError, TypeError):
        judges = None
    if not isinstance(judges, list) or not all(isinstance(item, str) for item in judges):
        raise InvalidInput(f"{path} does not say who scored (scored_by); train the model again")
    return judges
