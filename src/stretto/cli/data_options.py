"""Options that verbs of `stretto data` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from stretto.data.select import Selection

Prompts = Annotated[
    list[Path], typer.Option(metavar="FILE", help="JSONL with prompts; repeatable.")
]
PromptField = Annotated[
    str | None, typer.Option(metavar="NAME", help="Field of a prompt; else a usual one.")
]
ResponseField = Annotated[
    str | None, typer.Option(metavar="NAME", help="Field of a response; else a usual one.")
]
Split = Annotated[
    str, typer.Option(metavar="LOW-HIGH", help="Only prompts with hashes in these percents.")
]
SkipIf = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="Skip lines where this field is not empty; repeatable."),
]
Limit = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Only the N prompts of lowest hash.")
]
NoPrompts = Annotated[
    bool, typer.Option("--no-prompts", help="Leave prompts' texts out of the files written.")
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="PATH", help="A tokenizer.json, its folder, or a model.")
]
Unit = Annotated[int, typer.Option(min=1, help="Tokens that a promise's number counts in.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def selection(split: str, skip_if: list[str] | None, limit: int | None) -> Selection:
    from stretto.data.select import Selection, Split

    return Selection(Split.parse(split), tuple(skip_if or ()), limit)


def holds_answers(file: Path) -> bool:
    """Whether a file's first row is a sampled answer."""
    from stretto.data.rows import read_lines

    _, first = next(read_lines(file), (0, {}))
    return "ids" in first and "prompt_id" in first


def check(low: int = 1, **values: int | None) -> None:
    from stretto.errors import InvalidInput

    for name, value in values.items():
        if value is not None and value < low:
            raise InvalidInput(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


def show(result: dict[str, Any], as_json: bool) -> None:
    """A summary on stdout: one JSON object, or a line per figure."""
    from stretto.cli.output import write_json, write_line

    if as_json:
        write_json(result)
        return
    for name, value in result.items():
        write_line(f"{name.replace('_', ' '):<20} {worded(value)}")


def worded(value: Any) -> str:
    """A value for people: no braces, thousands apart."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{worded(v)} {k}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(worded, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
