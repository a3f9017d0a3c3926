"""`stretto train prefer`: rounds of sampling, scoring, pairing and training on the pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli import data_options, eval_parts, options, train_judge
from stretto.cli import train_score as parts

LR = {"full": 5e-7, "lora": 2e-4}
"""Full training: PASTA's. A LoRA's matrices begin near 0 and take more."""


def _given(what: str) -> str:
    return f"Of round 1: {what} that are there already."


def prefer(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A folder for all rounds.")],
    model: options.Model,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds in all.")] = 1,
    answers: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help=_given("answers") + " Repeatable.")
    ] = None,
    scored: Annotated[
        Path | None, typer.Option(metavar="FILE", help=_given("scored answers"))
    ] = None,
    pairs: Annotated[Path | None, typer.Option(metavar="FILE", help=_given("pairs"))] = None,
    prompts: eval_parts.Prompts = None,
    prompt_field: data_options.PromptField = None,
    skip_if: data_options.SkipIf = None,
    split: data_options.Split = "0-100",
    limit: data_options.Limit = None,
    n: Annotated[int, typer.Option(metavar="N", help="Answers of each prompt.")] = 10,
    max_tokens: options.MaxTokens = 512,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests under way at once.")] = 32,
    pool_slots: options.PoolSlots = 16384,
    sample_dtype: Annotated[str, typer.Option(help="Weights that sample, as --dtype.")] = "auto",
    engine: options.Engine = "auto",
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers of the sequential baseline.")
    ] = None,
    references: train_judge.References = None,
    reference_field: eval_parts.JudgeReferenceField = None,
    lam: parts.Lambda = "4",
    variant: parts.Variant = "speedup",
    length_ratio: parts.LengthRatio = None,
    judge: train_judge.JudgeName = "likelihood",
    judge_url: eval_parts.JudgeUrl = None,
    api_key_env: eval_parts.ApiKeyEnv = "OPENAI_API_KEY",
    expected: eval_parts.Expected = None,
    price_in: eval_parts.PriceIn = None,
    price_out: eval_parts.PriceOut = None,
    max_cost: eval_parts.MaxCost = None,
    concurrency: eval_parts.Concurrency = 8,
    alpha: Annotated[float, typer.Option(metavar="X", help="Weight of the SFT term.")] = 0.005,
    margin: Annotated[
        float | None, typer.Option(metavar="X", help="Log-ratio gap aimed at; else (n-1)H(n-1).")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(metavar="X", help="Learning rate; 2e-4, and 5e-7 if full.")
    ] = None,
    epochs: Annotated[float, typer.Option(metavar="X", help="Passes over the pairs.")] = 1.0,
    batch: Annotated[int, typer.Option(metavar="N", help="Pairs a step.")] = 8,
    pack_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens a pass.")] = 4096,
    warmup: Annotated[float, typer.Option(metavar="X", help="Steps, or a share of them.")] = 0.1,
    schedule: Annotated[str, typer.Option(help="linear, cosine or constant.")] = "linear",
    max_grad_norm: Annotated[float, typer.Option(metavar="X", help="Clip gradients here.")] = 1.0,
    max_steps: Annotated[int | None, typer.Option(metavar="N", help="Steps a round.")] = None,
    checkpoint_every: Annotated[int, typer.Option(metavar="N", help="In steps.")] = 20,
    full: Annotated[bool, typer.Option("--full", help="Train all weights, not a LoRA.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Of a new LoRA; 4.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="Layers of a new LoRA: all, attention, mlp.")
    ] = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    no_prompts: data_options.NoPrompts = False,
    as_json: data_options.AsJson = False,
    quiet: data_options.Quiet = False,
) -> None:
    """Train on the best and worst of a model's own answers, round after round.

    Each round samples with the model of the round before. The same command goes on where it ended.
    """
    from stretto.cli.train_parts import check_lora, is_first
    from stretto.cli.train_plan import Plan, Sampling
    from stretto.cli.train_rounds import run_rounds
    from stretto.train.lora import Lora
    from stretto.train.prefer_run import PreferSettings
    from stretto.train.schedule import Schedule

    data_options.check(
        rounds=rounds, requests=requests, concurrency=concurrency, batch=batch, threads=threads,
        pack_tokens=pack_tokens, max_steps=max_steps, checkpoint_every=checkpoint_every, rank=rank,
    )  # fmt: skip
    data_options.check(low=2, n=n)
    check_lora("full" if full else "lora", {"rank": rank, "targets": targets})
    lora = Lora(4 if rank is None else rank, targets="all" if targets is None else targets)
    settings = PreferSettings(
        schedule=Schedule(LR["full" if full else "lora"] if lr is None else lr, schedule, warmup),  # type: ignore[arg-type]
        alpha=alpha,
        margin=margin,
        epochs=epochs,
        pairs_per_step=batch,
        pack_tokens=pack_tokens,
        max_grad_norm=max_grad_norm,
        max_steps=max_steps,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    judging, held_against = train_judge.judge_settings(
        judge,
        references,
        reference_field,
        url=judge_url,
        api_key_env=api_key_env,
        expected=expected,
        concurrency=concurrency,
        price_in=price_in,
        price_out=price_out,
        max_cost=max_cost,
        device=device,
    )
    plan = Plan(
        out=out,
        start=model,
        rounds=rounds,
        given=(tuple(answers or ()), scored, pairs),
        prompts=tuple(prompts or ()),
        prompt_field=prompt_field,
        selection=data_options.selection(split, skip_if, limit),
        sampling=Sampling(
            n, max_tokens, requests, pool_slots, sample_dtype, engine, not no_prompts
        ),
        baseline=baseline,
        held_against=held_against,
        lam=lam,
        variant=variant,
        length_ratio=length_ratio,
        judge=judging,
        settings=settings,
        lora=None if full else lora,
        dtype=dtype,
        device=device,
        quiet=quiet,
    )
    parts.set_threads(threads)
    code, result = run_rounds(plan)
    if is_first():
        show(result, as_json)
    raise typer.Exit(code)


def show(result: dict[str, Any], as_json: bool) -> None:
    """One JSON object; or what each round came to on stderr, and the last model on stdout."""
    from stretto.cli.output import say, write_json, write_line

    if as_json:
        write_json(result)
        return
    for entry in result["rounds"]:
        if entry.get("done"):
            say(f"round {entry['round']}: done before")
        for stage in ("sampling", "scoring", "pairs", "training"):
            for name, value in entry.get(stage, {}).items():
                say(f"round {entry['round']}, {stage}: {name} {data_options.worded(value)}")
    if result["model"] is not None:
        write_line(result["model"])
