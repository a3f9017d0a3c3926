"""Options of the verbs of `stretto data` in which a teacher, or a model, reads responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _teacher(help_text: str, **settings: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Teacher", **settings)


Responses = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="JSONL: answers, or prompts with one.")
]
Prompts = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Prompts of rows without; repeatable.")
]
Model = Annotated[str | None, typer.Option(help="The teacher's name, or the model that measures.")]
BaseUrl = Annotated[str | None, _teacher("Address up to its /v1; else OpenAI's.", metavar="URL")]
KeyEnv = Annotated[str, _teacher("Variable that holds the key.", metavar="NAME")]
Temperature = Annotated[float, _teacher("Below 0: left to the endpoint.", metavar="X")]
MaxTokens = Annotated[int, _teacher("Of a reply.", metavar="N")]
Concurrency = Annotated[int, _teacher("Requests at once.", metavar="N")]
Timeout = Annotated[float, _teacher("Seconds to wait for a reply.", metavar="S")]
Attempts = Annotated[int, _teacher("Tries of a request.", metavar="N")]
PriceIn = Annotated[float | None, _teacher("Of a million tokens asked.", metavar="X")]
PriceOut = Annotated[float | None, _teacher("Of a million tokens replied.", metavar="X")]
Cap = Annotated[float | None, _teacher("Most to spend, earlier runs included.", metavar="X")]
