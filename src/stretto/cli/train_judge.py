"""Who judges sampled answers, for `stretto train score` and `train prefer`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import eval_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.eval.judges import JudgeSettings
    from stretto.train.scoring import Scoring

NO_JUDGE = "none"

JudgeName = Annotated[
    str,
    typer.Option(
        "--judge", metavar="KIND[:MODEL]", help="likelihood, llm, exact, reference or none."
    ),
]
References = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="JSONL with answers, for reference and llm; repeatable."),
]


@dataclass(frozen=True)
class HeldAgainst:
    """Files of reference answers that a judge compares each answer with, beside the baseline's;
    none for a judge that does not, or has them as its own."""

    paths: tuple[Path, ...] = ()
    field: str | None = None

    def read(self) -> dict[str, str]:
        """The first reference of each prompt by `prompt_id`."""
        from stretto.eval.judges.reference import read_references

        found = read_references(self.paths, self.field) if self.paths else {}
        return {name: texts[0] for name, texts in found.items()}


def judge_settings(
    judge: str, references: Sequence[Path] | None, field: str | None, **settings: Any
) -> tuple[JudgeSettings | None, HeldAgainst]:
    """Of `KIND[:MODEL]`, None for none; and the references that `llm` holds answers against.

    They are read, before hours are spent on answers. Raises `InvalidInput` for references that a
    judge has no use for, that are missing, or that cannot be read.
    """
    from stretto.errors import InvalidInput

    kind, held_against = judge.partition(":")[0], HeldAgainst(tuple(references or ()), field)
    if field is not None and not held_against.paths:
        raise InvalidInput("--reference-field is of references; name their file (--references)")
    if judge == NO_JUDGE and held_against.paths:
        raise InvalidInput("judge none has no use for --references; leave it out")
    if kind == "reference" and not held_against.paths:
        raise InvalidInput("judge reference needs answers; name a file (--references)")
    if judge == NO_JUDGE:
        return None, held_against
    own = {"references": held_against.paths or None, "reference_field": field}
    made = eval_parts.judge_settings(judge, **({} if kind == "llm" else own), **settings)
    held_against.read()
    return made, held_against if kind == "llm" else HeldAgainst()


def say_unrated(scoring: Scoring) -> None:
    """Names prompts none of whose answers the judge could rate."""
    from stretto.cli.output import say

    if names := scoring.unrated:
        say(f"{len(names)} prompts have no quality: {eval_parts.some_of(names)}")
