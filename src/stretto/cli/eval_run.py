"""`stretto eval run`: answer a task's prompts, measure speed and quality together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_options, options
from stretto.cli import eval_parts as parts
from stretto.cli.eval_sides import (
    AUTO,
    NO_BASELINE,
    Arm,
    Loader,
    baseline_of,
    chosen_arms,
    load_sides,
    told_side,
)
from stretto.errors import INTERRUPTED, SOME_FAILED
from stretto.params import SamplingParams

if TYPE_CHECKING:
    from stretto.eval.job import Job
    from stretto.eval.judges import JudgeSettings
    from stretto.eval.tasks import Prompts, Source, Task
    from stretto.eval.together import Meter

DEFAULT_POOL_SLOTS, BATCH = 8192, 16
"""Those of `LM.load` and of a `Job`."""


TaskName = Annotated[str, typer.Option("--task", help="instruct, gsm8k, multipart or a problem's.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="The run's folder; of arms, of all runs.")]
ReferenceField = Annotated[
    str | None, typer.Option(metavar="NAME", help="Field of a right answer; else a usual one.")
]
SplitRange = Annotated[
    str, typer.Option(metavar="LOW-HIGH", help="As in data; of made ones train, valid, test.")
]
Size = Annotated[
    str,
    typer.Option(metavar="N|LOW-HIGH", help="Of problems: steps before the answer; else 12-24."),
]
Model = Annotated[str | None, typer.Option(help="A name, folder, .gguf file or hub org/model.")]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm", metavar="NAME=MODEL[:METHOD]", help="Measure several at once; repeatable."
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(help="Decoded sequentially; the same weights unless given; none: no baseline."),
]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A control token never to draw, as sync; repeatable."),
]
NoJoins = Annotated[
    bool, typer.Option("--no-joins", help="Syncs neither wait nor join: main goes on blind.")
]
Pairs = Annotated[int, typer.Option(help="Timed decodes a side and prompt; 0: none.")]
Warm = Annotated[
    str, typer.Option(help="Decode untimed before timing: on the first prompt, or on every one.")
]
Samples = Annotated[int, typer.Option("--n", metavar="N", help="Answers a prompt and side.")]
Batch = Annotated[int, typer.Option(metavar="N", help="Requests of a side at once, without pairs.")]
Until = Annotated[int | None, typer.Option(metavar="N", help="Only the first N prompts for now.")]


def eval_run(
    *,
    task: TaskName,
    out: Out,
    prompts: parts.Prompts = None,
    prompt_field: data_options.PromptField = None,
    reference_field: ReferenceField = None,
    skip_if: data_options.SkipIf = None,
    split: SplitRange = "",
    limit: data_options.Limit = None,
    size: Size = "",
    model: Model = None,
    method: options.Method = AUTO,
    arm: Arms = None,
    baseline: Baseline = None,
    without: Without = None,
    no_joins: NoJoins = False,
    pairs: Pairs = 1,
    warm: Warm = "first",
    until: Until = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    page_size: options.PageSize = 1,
    pool_slots: options.PoolSlots = DEFAULT_POOL_SLOTS,
    batch: Batch = BATCH,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    n: Samples = 1,
    seed: options.Seed = 0,
    no_prompts: data_options.NoPrompts = False,
    judge: parts.JudgeName = None,
    judge_url: parts.JudgeUrl = None,
    references: parts.References = None,
    as_json: parts.AsJson = False,
) -> None:
    """Answer a task's prompts by a model and by a baseline; time, score and keep every answer.

    With --arm, by several models at once, each with a run of its own in DIR/NAME. The same command
    goes on where a killed run was.
    """
    from stretto.cli.bench_parts import check, prepare
    from stretto.eval.job import Job
    from stretto.eval.tasks import Source, get_task, load_prompts

    check(threads=threads, until=until, n=n, batch=batch)
    check(low=0, pairs=pairs, seed=seed)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    arms = chosen_arms(
        out, arm or (), model=model, method=method, without=without or (), joins=not no_joins
    )
    _check(arms, dtype, engine, warm)
    other = baseline_of(arms, baseline)
    settings = _judge(judge, judge_url, references, other, n)
    chosen = get_task(task)
    source = Source(
        tuple(prompts or ()), prompt_field, reference_field, limit, seed, split,
        skip_if=tuple(skip_if or ()), size=size,
    )  # fmt: skip
    found = load_prompts(chosen, source)
    for one in arms:
        prepare(one.out)
    loader = Loader(dtype, device, engine, threads, page_size, pool_slots)
    sides = load_sides(loader, arms, other)
    job = Job(
        chosen, found, *sides, params, n, pairs, warm, keeps_prompts=not no_prompts, batch=batch
    )
    configs = [_config(job, one, other, source, device) for one in arms]
    if settings is not None:
        parts.check_judge(settings, configs)
    num_left = _evaluate(job, arms, configs, device, until)
    if num_left:
        _show_left(job, num_left, as_json)
        return
    kind = None if settings is None else settings.kind
    unjudged: list[str] = []
    if settings is not None:
        unjudged = parts.judge_runs([one.out for one in arms], settings, source.paths)
    _finish(arms, kind, as_json, unjudged)


def _judge(
    judge: str | None, url: str | None, references: list[Path] | None, baseline: str, n: int
) -> JudgeSettings | None:
    """Whom the run is to be judged by. Raises `InvalidInput` if it could not be."""
    from stretto.errors import InvalidInput

    if judge is None:
        return None
    if baseline == NO_BASELINE:
        raise InvalidInput("a judge compares with the baseline; leave out --judge or --baseline")
    if n > 1:
        raise InvalidInput(
            f"a judge compares one answer a prompt, not {n}; leave out --judge or --n"
        )
    return parts.judge_settings(
        judge, url=url, references=tuple(references) if references else None
    )


def _check(arms: Sequence[Arm], dtype: str, engine: str, warm: str) -> None:
    """Raises for what cannot work, before anything is loaded."""
    from stretto.engines.choose import check_engine
    from stretto.errors import UnknownName
    from stretto.eval.job import WARM
    from stretto.methods import check_method
    from stretto.models.loading import DTYPES

    for arm in arms:
        check_method(arm.method)
    check_engine(engine)
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, list(DTYPES))
    if warm not in WARM:
        raise UnknownName("warm-up", warm, list(WARM))


def _config(job: Job, arm: Arm, baseline: str, source: Source, device: str) -> dict[str, Any]:
    """All that decides what is measured of an arm; two runs with the same one are the same run."""
    import torch

    from stretto.bench.program import Target

    side = job.arms[arm.name]
    own = {"without": list(arm.without), "joins": arm.joins}
    return {
        "task": _task_config(job.task, job.prompts, source),
        "ours": (told_side(side, arm.model) or {}) | own,
        "baseline": told_side(job.baseline, baseline),
        "sampling": {
            "max_tokens": job.params.max_tokens,
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
            "repetition_penalty": job.params.repetition_penalty,
            "seed": job.params.seed,
            "samples": job.num_samples,
        },
        "place": {
            "engine": side.lm.engine.name,
            "dtype": Target.of(side.lm).dtype,
            "device": device,
            "torch_threads": torch.get_num_threads(),
            "page_size": side.page_size,
        },
        "pairs": job.num_pairs,
        "warm": job.warm,
        "keeps_prompts": job.keeps_prompts,
    }


def _task_config(task: Task, prompts: Prompts, source: Source) -> dict[str, Any]:
    return {
        "name": task.name,
        "version": task.version,
        "has_scores": task.score is not None,
        "has_votes": task.has_votes,
        "num_prompts": len(prompts.items),
        "left_out": prompts.left_out,
        "digest": prompts.digest,
        "prompt_field": source.prompt_field,
        "reference_field": source.reference_field,
        "limit": source.limit,
        "split": source.split,
        "skip_if": list(source.skip_if),
        "size": source.size,
    }


def _evaluate(
    job: Job, arms: Sequence[Arm], configs: Sequence[dict[str, Any]], device: str,
    until: int | None,
) -> int:  # fmt: skip
    """Measures what is missing of the first `until` prompts; how many of all are missing then, in
    some arm or sample. Exits after Ctrl-C."""
    from stretto.cli.output import interruptible, say
    from stretto.data.store import Store
    from stretto.eval import folder
    from stretto.eval.rows import EvalRow, row_key
    from stretto.eval.runner import evaluate

    for reason, count in job.prompts.left_out.items():
        say(f"left out by {reason}: {count}")
    for arm, config in zip(arms, configs, strict=True):
        folder.start(arm.out, config)
    keys = [
        [row_key(item.prompt_id, sample) for sample in range(job.num_samples)]
        for item in job.prompts.items
    ]
    wanted = [key for own in keys[:until] for key in own]
    meters: dict[str, Meter] = {}
    with ExitStack() as opened, interruptible() as is_interrupted:
        stores = {a.name: opened.enter_context(Store(a.out / folder.ROWS, EvalRow)) for a in arms}
        for arm in arms:
            folder.check_environment(arm.out, folder.read_eval_rows(arm.out))
        missing = [a for a in arms if any(name not in stores[a.name] for name in wanted)]
        processes = {a.name: folder.add_environment(a.out, _environment(device)) for a in missing}
        is_done = evaluate(
            job, {arm.name: stores[arm.name] for arm in missing}, processes=processes, report=say,
            is_interrupted=is_interrupted, until=until, meters=meters,
        )  # fmt: skip
        rows = list(stores.values())
        num_done = sum(all(key in store for store in rows for key in own) for own in keys)
        for arm in arms:
            folder.put_in_order(arm.out)
    for name in meters.keys() & processes.keys():
        out = next(arm.out for arm in arms if arm.name == name)
        folder.note_environment(out, processes[name], {"throughput": asdict(meters[name])})
    if not is_done:
        say(f"interrupted after {num_done} prompts; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    return len(job.prompts.items) - num_done


def _show_left(job: Job, num_left: int, as_json: bool) -> None:
    """Of a run that was to end before all prompts are done."""
    from stretto.cli.bench_parts import show

    size = len(job.prompts.items)
    counts = {"prompts": size, "done": size - num_left}
    text = f"{size - num_left} of {size} prompts are done; without --until the rest follows"
    show(counts if as_json else None, text)


def _environment(device: str) -> dict[str, Any]:
    import os
    import shlex
    import sys
    from datetime import UTC, datetime

    from stretto.bench.machine import describe_machine

    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["stretto", *sys.argv[1:]]),
        "load": round(os.getloadavg()[0], 2),
        "machine": describe_machine(device),
    }


def _finish(arms: Sequence[Arm], kind: str | None, as_json: bool, unjudged: Sequence[str]) -> None:
    """Writes all summaries and shows the one, or the comparison of several runs; exits with 3 if
    some prompts failed."""
    from stretto.cli.bench_parts import show
    from stretto.cli.output import say
    from stretto.eval import compare
    from stretto.eval.folder import load_run, unjudged_run
    from stretto.eval.summary import save_summary, text_of

    runs = [unjudged_run(a.out) if kind is None else load_run(a.out, kind) for a in arms]
    summaries = [save_summary(run) for run in runs]
    for arm in arms:
        say(f"wrote {arm.out}")
    if len(runs) == 1:
        show(summaries[0] if as_json else None, text_of(summaries[0]))
    else:
        result = compare.compare(runs)
        show(result if as_json else None, compare.text_of(result))
    parts.say_unjudged(unjudged)
    if unjudged or any(summary["counts"]["failures"] for summary in summaries):
        raise typer.Exit(SOME_FAILED)
