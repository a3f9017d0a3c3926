"""`stretto train`: teach a model to write a dialect."""

from __future__ import annotations

from typing import Annotated

import typer

from stretto.cli import train_options as shared
from stretto.cli.train_grpo import grpo
from stretto.cli.train_options import Files, option
from stretto.cli.train_prefer import prefer
from stretto.cli.train_score import pairs, score

app = typer.Typer(no_args_is_help=True, help="Teach a model to write a dialect.")


@app.callback()
def train() -> None:
    """Teach a model to write a dialect."""


Data = Annotated[Files, option("Data", "Rows to learn; repeatable.", metavar="FILE")]
Prompts = Annotated[Files, option("Data", "Where the rows' prompts are; repeatable.")]
PromptField = Annotated[str | None, option("Data", "The prompts' field.", metavar="NAME")]
Valid = Annotated[Files, option("Data", "Rows for validation; repeatable.", metavar="FILE")]
ValidShare = Annotated[float | None, option("Data", "Share of prompts held out.", metavar="X")]
MaxTokens = Annotated[int | None, option("Data", "Leave out longer examples.", metavar="N")]
Baseline = Annotated[
    bool | None, option("Data", "Learn the responses without annotations.", "--baseline")
]
Lengths = Annotated[str | None, option("Data", "exact, tens, fixed or overlap.", metavar="NAME")]
FixedLength = Annotated[int | None, option("Data", "Of --lengths fixed.", metavar="N")]
Registers = Annotated[int | None, option("Model", "How many; of tip.", "--registers", metavar="N")]
Grace = Annotated[
    bool | None, option("Model", "Whether one sees the step it kills.", "--grace/--strict")
]
Slack = Annotated[
    float | None, option("Data", "How often a span is promised a unit more.", metavar="X")
]
Window = Annotated[int | None, option("Data", "Learn responses in spans, unplanned.", metavar="N")]
Block = Annotated[int | None, option("Data", "Tokens of a span of a window.", metavar="N")]
Variant = Annotated[str | None, option("Model", "sparse or dense; of planned.")]
Convention = Annotated[str | None, option("Model", "shifted or aligned; of planned.")]
PlanWeight = Annotated[float | None, option("Steps", "Of the loss of plans.", metavar="X")]
SpanWeight = Annotated[float | None, option("Steps", "Of the loss of spans.", metavar="X")]
DialectName = Annotated[str | None, option("Model", "pasta or another.", "--dialect")]
Dropout = Annotated[float | None, option("Model", "Of the LoRA's inputs.", metavar="X")]
Init = Annotated[str | None, option("Model", "New rows: forms, mean or random.")]
Lr = Annotated[float | None, option("Steps", "Highest learning rate.", metavar="X")]
Warmup = Annotated[float | None, option("Steps", "Steps, or a share of them.", metavar="X")]
Epochs = Annotated[float | None, option("Steps", "Times through the data.", metavar="X")]
MaxSteps = Annotated[int | None, option("Steps", "Steps at most.", metavar="N")]
BatchSize = Annotated[int | None, option("Steps", "Examples a step.", "--batch", metavar="N")]
BatchTokens = Annotated[int | None, option("Steps", "Tokens a step.", metavar="N")]
PackTokens = Annotated[int | None, option("Steps", "Tokens a sequence.", metavar="N")]


@app.command()
def sft(
    *,
    config: shared.Config = None,
    data: Data = None,
    prompts: Prompts = None,
    out: shared.Out = None,
    model: shared.Model = None,
    dialect: DialectName = None,
    lora: shared.AsLora = False,
    full: shared.AsFull = False,
    rank: shared.Rank = None,
    alpha: shared.Alpha = None,
    targets: shared.Targets = None,
    dropout: Dropout = None,
    init: Init = None,
    lr: Lr = None,
    schedule: shared.ScheduleName = None,
    warmup: Warmup = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    batch: BatchSize = None,
    batch_tokens: BatchTokens = None,
    pack_tokens: PackTokens = None,
    weight_decay: shared.WeightDecay = None,
    max_grad_norm: shared.MaxGradNorm = None,
    valid: Valid = None,
    valid_share: ValidShare = None,
    valid_every: shared.ValidEvery = None,
    checkpoint_every: shared.CheckpointEvery = None,
    max_tokens: MaxTokens = None,
    prompt_field: PromptField = None,
    baseline: Baseline = None,
    lengths: Lengths = None,
    fixed_length: FixedLength = None,
    registers: Registers = None,
    grace: Grace = None,
    variant: Variant = None,
    convention: Convention = None,
    slack: Slack = None,
    window: Window = None,
    block: Block = None,
    plan_weight: PlanWeight = None,
    span_weight: SpanWeight = None,
    dtype: shared.Dtype = None,
    device: shared.Device = None,
    seed: shared.Seed = None,
    dry_run: shared.DryRun = False,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Train a model on annotated responses, under exactly the visibility it will run under."""
    changes = dict(locals())
    for name in ("config", "lora", "full", "dry_run", "as_json", "quiet"):
        changes.pop(name)
    from stretto.cli.train_parts import (
        check_lora,
        estimate_of,
        how_of,
        plain_values,
        run_sft,
        show_estimate,
    )
    from stretto.train.config import SftConfig

    changes["how"] = how_of(lora=lora, full=full)
    settings = SftConfig.read(config, plain_values(changes))
    check_lora(settings.how, changes)
    if dry_run:
        show_estimate(estimate_of(settings), as_json=as_json)
        return
    run_sft(settings, as_json=as_json, quiet=quiet)


# Further verbs of `train` are registered here, one line each.
app.command()(score)
app.command()(pairs)
app.command()(prefer)
app.command()(grpo)
