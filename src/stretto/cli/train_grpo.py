"""`stretto train grpo`: a model learns from problems with known answers, and to hold less KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from stretto.cli import train_options as shared
from stretto.cli.options import MAX_THREADS
from stretto.cli.train_options import Files, option

Number = int | None
Real = float | None
Name = str | None

Task = Annotated[Name, option("Problems", "exact, boxed, program, tree, ... or of stretto eval.")]
Prompts = Annotated[Files, option("Problems", "JSONL with prompts; repeatable.", metavar="FILE")]
PromptField = Annotated[Name, option("Problems", "The prompts' field.", metavar="NAME")]
ReferenceField = Annotated[Name, option("Problems", "The answers' field.", metavar="NAME")]
Split = Annotated[Name, option("Problems", "LOW-HIGH percents, or a split that is made.")]
Sizes = Annotated[Name, option("Problems", "Of problems that are made: N or LOW-HIGH.")]
Limit = Annotated[Number, option("Problems", "Problems at most.", metavar="N")]
TaskSeed = Annotated[Number, option("Problems", "Of problems that are made.", metavar="N")]
Valid = Annotated[Files, option("Problems", "For validation; repeatable.", metavar="FILE")]
ValidSplit = Annotated[Name, option("Problems", "For validation, as --split.")]
ValidLimit = Annotated[Number, option("Problems", "For validation, at most.", metavar="N")]

PerStep = Annotated[Number, option("Rollouts", "Problems a step.", metavar="N")]
Samples = Annotated[Number, option("Rollouts", "Answers to each.", metavar="N")]
MaxTokens = Annotated[Number, option("Rollouts", "Tokens of an answer.", metavar="N")]
Requests = Annotated[Number, option("Rollouts", "Answers under way at once.", metavar="N")]
PoolSlots = Annotated[Number, option("Rollouts", "KV slots in all.", metavar="N")]
Engine = Annotated[Name, option("Rollouts", "auto, hf, fused or flex.")]

KvWeight = Annotated[Real, option("Reward", "Weight of KV; 0 is none.", metavar="X")]
Reward = Annotated[Name, option("Reward", "separate, r1, r2 or r3.")]
KvMeasure = Annotated[Name, option("Reward", "cost, same, or a number of tokens.")]
KvFree = Annotated[Real, option("Reward", "KV that costs nothing, of r1.", metavar="X")]
KvLength = Annotated[Number, option("Reward", "Usual length, of cost.", metavar="N")]
KvTokens = Annotated[Name, option("Reward", "all, or control: annotation tokens.")]
Scale = Annotated[Name, option("Reward", "none, group or batch.")]

Clip = Annotated[Real, option("Loss", "How far ratios may be from 1.", metavar="X")]
ClipHigh = Annotated[Real, option("Loss", "How far above 1, if not as --clip.", metavar="X")]
Beta = Annotated[Real, option("Loss", "Weight of the KL to the start.", metavar="X")]
Aggregation = Annotated[Name, option("Loss", "dapo, grpo or dr_grpo.")]
Inner = Annotated[Number, option("Loss", "Times through a step's answers.", metavar="N")]
Minibatches = Annotated[Number, option("Loss", "Updates each time through.", metavar="N")]
PackTokens = Annotated[Number, option("Loss", "Tokens a sequence.", metavar="N")]

Threads = Annotated[
    Number, option("Model", "CPU threads to compute with.", metavar="N", min=1, max=MAX_THREADS)
]

Steps = Annotated[Number, option("Steps", "Rounds of answers.", metavar="N")]
Lr = Annotated[Real, option("Steps", "Learning rate; 1e-6 if full, 1e-5.", metavar="X")]
Warmup = Annotated[Real, option("Steps", "Updates, or a share of them.", metavar="X")]
Tolerance = Annotated[Real, option("Steps", "Accuracy that less KV may cost.", metavar="X")]


def grpo(
    *,
    config: shared.Config = None,
    out: shared.Out = None,
    model: shared.Model = None,
    task: Task = None,
    prompts: Prompts = None,
    prompt_field: PromptField = None,
    reference_field: ReferenceField = None,
    split: Split = None,
    sizes: Sizes = None,
    limit: Limit = None,
    task_seed: TaskSeed = None,
    valid: Valid = None,
    valid_split: ValidSplit = None,
    valid_limit: ValidLimit = None,
    steps: Steps = None,
    prompts_per_step: PerStep = None,
    samples: Samples = None,
    max_tokens: MaxTokens = None,
    requests: Requests = None,
    pool_slots: PoolSlots = None,
    engine: Engine = None,
    kv_weight: KvWeight = None,
    reward: Reward = None,
    kv_measure: KvMeasure = None,
    kv_free: KvFree = None,
    kv_length: KvLength = None,
    kv_tokens: KvTokens = None,
    scale: Scale = None,
    clip: Clip = None,
    clip_high: ClipHigh = None,
    beta: Beta = None,
    aggregation: Aggregation = None,
    inner: Inner = None,
    minibatches: Minibatches = None,
    pack_tokens: PackTokens = None,
    lora: shared.AsLora = False,
    full: shared.AsFull = False,
    rank: shared.Rank = None,
    alpha: shared.Alpha = None,
    targets: shared.Targets = None,
    lr: Lr = None,
    schedule: shared.ScheduleName = None,
    warmup: Warmup = None,
    weight_decay: shared.WeightDecay = None,
    max_grad_norm: shared.MaxGradNorm = None,
    valid_every: shared.ValidEvery = None,
    valid_tolerance: Tolerance = None,
    checkpoint_every: shared.CheckpointEvery = None,
    dtype: shared.Dtype = None,
    device: shared.Device = None,
    threads: Threads = None,
    seed: shared.Seed = None,
    dry_run: shared.DryRun = False,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Reward a model's own answers to problems: for being right, and for holding less KV.

    The same command goes on where it ended; no answer is drawn twice.
    """
    changes = dict(locals())
    for name in ("config", "lora", "full", "threads", "dry_run", "as_json", "quiet"):
        changes.pop(name)
    from stretto.cli.train_parts import check_lora, how_of, plain_values, show_estimate
    from stretto.cli.train_score import set_threads
    from stretto.train.grpo_config import GrpoConfig

    changes["how"] = how_of(lora=lora, full=full)
    settings = GrpoConfig.read(config, plain_values(changes))
    check_lora(settings.how, changes)
    set_threads(threads)
    if dry_run:
        from stretto.train.grpo_estimate import estimate_grpo

        show_estimate(estimate_grpo(settings), as_json=as_json)
        return
    _run(settings, as_json=as_json, quiet=quiet)


def _run(settings: Any, *, as_json: bool, quiet: bool) -> None:
    """Trains, and says how it went. Exits with 130 where Ctrl-C stopped it, and with 3 where
    problems could not be answered."""
    from stretto.cli.data_progress import Progress
    from stretto.cli.output import interruptible, say, write_json, write_line
    from stretto.errors import INTERRUPTED, SOME_FAILED
    from stretto.train.grpo_run import GrpoHooks, train_grpo

    with interruptible() as pressed, Progress(quiet=quiet) as progress:
        hooks = GrpoHooks(
            report=None if quiet else lambda line: progress.note(_worded(line)),
            report_rollouts=lambda done, of: progress.update(f"{done}/{of} answers"),
            should_stop=pressed,
        )
        summary = train_grpo(settings, hooks=hooks)
    if as_json:
        write_json(summary)
    elif summary["model"] is not None:
        write_line(summary["best"] or summary["model"])
    if not summary["is_complete"]:
        say(f"stopped after update {summary['updates']}; the same command goes on")
        raise typer.Exit(INTERRUPTED)
    if summary["rejected"]:
        say(f"problems were left out: see {summary['out']}/rejects.jsonl")
        raise typer.Exit(SOME_FAILED)


def _worded(line: Mapping[str, Any]) -> str:
    """A line of the metrics for people."""
    kv = f", KV {line['kv']:.2f}" if "kv" in line else ""
    common = (
        f"right {line['accuracy']:.1%}{kv}, live {line['live']:.1f}, length {line['length']:.1f}, "
        f"cut {line['truncated']:.0%}"
    )
    if line["kind"] == "valid":
        return f"validation after update {line['step']}: {common}"
    return (
        f"update {line['step']}/{line['of']}: {common}, no signal {line['no_signal']:.0%}, clipped "
        f"{line['clipped']:.1%}, norm {line['grad_norm']:.2g}, {line['seconds']:.1f} s"
    )
