"""`stretto train`: teach a model to write a dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli.train_grpo import grpo
from stretto.cli.train_prefer import prefer
from stretto.cli.train_score import pairs, score

app = typer.Typer(no_args_is_help=True, help="Teach a model to write a dialect.")


@app.callback()
def train() -> None:
    """Teach a model to write a dialect."""


def _option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


Files = list[Path] | None
Config = Annotated[Path | None, _option("Run", "TOML file of settings.", metavar="FILE")]
Out = Annotated[Path | None, _option("Run", "Folder of the run.", metavar="DIR")]
DryRun = Annotated[bool, _option("Run", "Say what it would take, and train nothing.", "--dry-run")]
AsJson = Annotated[bool, _option("Run", "Print JSON.", "--json")]
Quiet = Annotated[bool, _option("Run", "No progress.", "--quiet", "-q")]
Data = Annotated[Files, _option("Data", "Rows to learn; repeatable.", metavar="FILE")]
Prompts = Annotated[Files, _option("Data", "Where the rows' prompts are; repeatable.")]
PromptField = Annotated[str | None, _option("Data", "The prompts' field.", metavar="NAME")]
Valid = Annotated[Files, _option("Data", "Rows for validation; repeatable.", metavar="FILE")]
ValidShare = Annotated[float | None, _option("Data", "Share of prompts held out.", metavar="X")]
MaxTokens = Annotated[int | None, _option("Data", "Leave out longer examples.", metavar="N")]
Baseline = Annotated[
    bool | None, _option("Data", "Learn the responses without annotations.", "--baseline")
]
Lengths = Annotated[str | None, _option("Data", "exact, tens, fixed or overlap.", metavar="NAME")]
FixedLength = Annotated[int | None, _option("Data", "Of --lengths fixed.", metavar="N")]
Registers = Annotated[int | None, _option("Model", "How many; of tip.", "--registers", metavar="N")]
Grace = Annotated[
    bool | None, _option("Model", "Whether one sees the step it kills.", "--grace/--strict")
]
Slack = Annotated[
    float | None, _option("Data", "How often a span is promised a unit more.", metavar="X")
]
Window = Annotated[int | None, _option("Data", "Learn responses in spans, unplanned.", metavar="N")]
Block = Annotated[int | None, _option("Data", "Tokens of a span of a window.", metavar="N")]
Variant = Annotated[str | None, _option("Model", "sparse or dense; of planned.")]
Convention = Annotated[str | None, _option("Model", "shifted or aligned; of planned.")]
PlanWeight = Annotated[float | None, _option("Steps", "Of the loss of plans.", metavar="X")]
SpanWeight = Annotated[float | None, _option("Steps", "Of the loss of spans.", metavar="X")]
Model = Annotated[str | None, _option("Model", "A name, folder, .gguf file or hub org/model.")]
DialectName = Annotated[str | None, _option("Model", "pasta or another.", "--dialect")]
AsLora = Annotated[bool, _option("Model", "Train a LoRA.", "--lora")]
AsFull = Annotated[bool, _option("Model", "Train all weights.", "--full")]
Rank = Annotated[int | None, _option("Model", "Of the LoRA.", metavar="N")]
Alpha = Annotated[float | None, _option("Model", "Of the LoRA; twice the rank.", metavar="X")]
Targets = Annotated[str | None, _option("Model", "all, attention, mlp, or layer names.")]
Dropout = Annotated[float | None, _option("Model", "Of the LoRA's inputs.", metavar="X")]
Init = Annotated[str | None, _option("Model", "New rows: forms or mean.")]
Dtype = Annotated[str | None, _option("Model", "bfloat16 or float32.")]
Device = Annotated[str | None, _option("Model", "cpu, cuda or cuda:N.")]
Lr = Annotated[float | None, _option("Steps", "Highest learning rate.", metavar="X")]
ScheduleName = Annotated[str | None, _option("Steps", "linear, cosine, constant.", "--schedule")]
Warmup = Annotated[float | None, _option("Steps", "Steps, or a share of them.", metavar="X")]
Epochs = Annotated[float | None, _option("Steps", "Times through the data.", metavar="X")]
MaxSteps = Annotated[int | None, _option("Steps", "Steps at most.", metavar="N")]
BatchSize = Annotated[int | None, _option("Steps", "Examples a step.", "--batch", metavar="N")]
BatchTokens = Annotated[int | None, _option("Steps", "Tokens a step.", metavar="N")]
PackTokens = Annotated[int | None, _option("Steps", "Tokens a sequence.", metavar="N")]
WeightDecay = Annotated[float | None, _option("Steps", "Of matrices.", metavar="X")]
MaxGradNorm = Annotated[float | None, _option("Steps", "Clip gradients to it.", metavar="X")]
ValidEvery = Annotated[int | None, _option("Steps", "Steps between validations.", metavar="N")]
CheckpointEvery = Annotated[int | None, _option("Steps", "Steps between checkpoints.")]
Seed = Annotated[int | None, _option("Steps", "Of all randomness.", metavar="N")]


@app.command()
def sft(
    *,
    config: Config = None,
    data: Data = None,
    prompts: Prompts = None,
    out: Out = None,
    model: Model = None,
    dialect: DialectName = None,
    lora: AsLora = False,
    full: AsFull = False,
    rank: Rank = None,
    alpha: Alpha = None,
    targets: Targets = None,
    dropout: Dropout = None,
    init: Init = None,
    lr: Lr = None,
    schedule: ScheduleName = None,
    warmup: Warmup = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    batch: BatchSize = None,
    batch_tokens: BatchTokens = None,
    pack_tokens: PackTokens = None,
    weight_decay: WeightDecay = None,
    max_grad_norm: MaxGradNorm = None,
    valid: Valid = None,
    valid_share: ValidShare = None,
    valid_every: ValidEvery = None,
    checkpoint_every: CheckpointEvery = None,
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
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model on annotated responses, under exactly the visibility it will run under."""
    changes = dict(locals())
    for name in ("config", "lora", "full", "dry_run", "as_json", "quiet"):
        changes.pop(name)
    from stretto.cli.train_parts import check_lora, how_of, plain_values, run_sft, show_estimate
    from stretto.train.config import SftConfig

    changes["how"] = how_of(lora=lora, full=full)
    settings = SftConfig.read(config, plain_values(changes))
    check_lora(settings.how, changes)
    if dry_run:
        show_estimate(settings, as_json=as_json)
        return
    run_sft(settings, as_json=as_json, quiet=quiet)


# Further verbs of `train` are registered here, one line each.
app.command()(score)
app.command()(pairs)
app.command()(prefer)
app.command()(grpo)
