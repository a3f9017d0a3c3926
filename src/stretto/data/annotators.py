"""What an annotator is: it puts annotations into a response and leaves its text as it was.

One interface for a teacher behind an API, for rules, and for measurements with a model.
`get_annotator` finds one by name and imports no other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from stretto.errors import SOME_FAILED, InvalidInput, StrettoError, UnknownName

ANNOTATORS = ("teacher", "structure", "likelihood", "apar")


@dataclass(frozen=True)
class Annotation:
    """An annotated response in the text form of dialect pasta, or of apar by annotator `apar`;
    equal to the response where nothing may be promised. `details`: what was measured or told, any
    JSON, kept with the row."""

    text: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """This response cannot be annotated, and asking again would not change that.

    `text`: what the annotator wrote instead, if anything.
    """

    reasons: list[str]
    text: str | None = None


class Unanswered(StrettoError):
    """No verdict on this one response now (no connection, no time): a later run asks again."""


class Postponed(Unanswered):
    """No verdict on this one response as things are set. Says nothing of the others, whereas many
    an `Unanswered` in a row ends a run."""


class Exhausted(StrettoError):
    """The annotator can do no more in this run, such as when its money is spent. Not a failure of
    the row at hand: what is left is done by a later run."""

    exit_code = SOME_FAILED


@runtime_checkable
class Annotator(Protocol):
    """Annotates one response at a time.

    The runner holds every annotation to the rules of `stretto data check` and makes a reject of
    one that breaks them, so an annotator need not check its own. If it has a `concurrency`,
    `annotate` is called from as many Python threads at once. If it has a `stop`, that is called,
    maybe more than once, where the run ends early: what waits to ask again should give up. Its
    `close`, if it has one, is called by the command line in the end.
    """

    @property
    def name(self) -> str:
        """Written into each row; names the method, not its settings."""
        ...

    def annotate(self, prompt: str, response: str) -> Annotation | Refusal:
        """Raises `Unanswered` or `Exhausted`; any other exception ends the run."""
        ...


def get_annotator(name: str, settings: Mapping[str, Any]) -> Annotator:
    """The annotator `name`, made with its own settings as keywords. Raises `UnknownName`."""
    return _maker(name)(**settings)


def checked_settings(name: str, own: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """A user's own settings of annotator `name`, of the types that it takes.

    `given`: settings that the caller gives it, so that no user can. Raises `InvalidInput` for one
    that it does not have and for a value that does not fit.
    """
    takes = inspect.signature(_maker(name), eval_str=True).parameters
    known = sorted(set(takes) - set(given))
    checked = {}
    for key, value in own.items():
        if key not in known:
            has = f"it has: {', '.join(known)}" if known else "it has none"
            raise InvalidInput(f"annotator {name} has no setting {key!r} of its own; {has}")
        try:
            checked[key] = TypeAdapter(takes[key].annotation).validate_python(value)
        except ValidationError as error:
            raise InvalidInput(
                f"setting {key} of annotator {name} cannot be {value!r}: {error.errors()[0]['msg']}"
            ) from None
    return checked


def _maker(name: str) -> Callable[..., Annotator]:
    makers: Mapping[str, Callable[[], Callable[..., Annotator]]] = {
        "teacher": _teacher,
        "structure": _structure,
        "likelihood": _likelihood,
        "apar": _apar,
    }
    if name not in makers:
        raise UnknownName("annotator", name, list(ANNOTATORS))
    return makers[name]()


def _teacher() -> Callable[..., Annotator]:
    from stretto.data.teacher import Teacher

    return Teacher


def _structure() -> Callable[..., Annotator]:
    from stretto.data.structure import Structure

    return Structure


def _likelihood() -> Callable[..., Annotator]:
    from stretto.data.likelihood import likelihood_annotator

    return likelihood_annotator


def _apar() -> Callable[..., Annotator]:
    from stretto.data.apar_rules import AparRules

    return AparRules
