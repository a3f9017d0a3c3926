"""Options that `stretto train sft` and `train grpo` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    """An option under a heading of the help."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


Files = list[Path] | None

Config = Annotated[Path | None, option("Run", "TOML file of settings.", metavar="FILE")]
Out = Annotated[Path | None, option("Run", "Folder of the run.", metavar="DIR")]
DryRun = Annotated[bool, option("Run", "Say what it would take, and train nothing.", "--dry-run")]
AsJson = Annotated[bool, option("Run", "Print JSON.", "--json")]
Quiet = Annotated[bool, option("Run", "No progress.", "--quiet", "-q")]

Model = Annotated[str | None, option("Model", "A name, folder, .gguf file or hub org/model.")]
AsLora = Annotated[bool, option("Model", "Train a LoRA.", "--lora")]
AsFull = Annotated[bool, option("Model", "Train all weights.", "--full")]
Rank = Annotated[int | None, option("Model", "Of the LoRA.", metavar="N")]
Alpha = Annotated[float | None, option("Model", "Of the LoRA; twice the rank.", metavar="X")]
Targets = Annotated[str | None, option("Model", "all, attention, mlp, or layer names.")]
Dtype = Annotated[str | None, option("Model", "bfloat16 or float32.")]
Device = Annotated[str | None, option("Model", "cpu, cuda or cuda:N.")]

ScheduleName = Annotated[str | None, option("Steps", "linear, cosine, constant.", "--schedule")]
WeightDecay = Annotated[float | None, option("Steps", "Of matrices.", metavar="X")]
MaxGradNorm = Annotated[float | None, option("Steps", "Clip gradients to it.", metavar="X")]
ValidEvery = Annotated[int | None, option("Steps", "Steps between validations.", metavar="N")]
CheckpointEvery = Annotated[int | None, option("Steps", "Steps between checkpoints.", metavar="N")]
Seed = Annotated[int | None, option("Steps", "Of all randomness.", metavar="N")]
