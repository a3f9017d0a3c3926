"""`stretto eval run`: answer a task's prompts, measure speed and quality together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_options, options
from stretto.cli import eval_parts as parts
from stretto.models.embedded import DEFAULT_MODEL
from stretto.params import SamplingParams

if TYPE_CHECKING:
    from stretto.eval.answers import Contestant
    from stretto.eval.runner import Job
    from stretto.eval.tasks import Prompts, Source, Task
    from stretto.lm import LM

NO_BASELINE = "none"
INTERRUPTED = 130

TaskName = Annotated[str, typer.Option("--task", help="instruct, gsm8k or multipart.")]
Baseline = Annotated[
    str | None,
    typer.Option(help="Decoded sequentially; the same weights unless given; none: no baseline."),
]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A control token never to draw, as sync; repeatable."),
]


def eval_run(
    *,
    task: TaskName,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run's folder.")],
    prompts: parts.Prompts = None,
    prompt_field: data_options.PromptField = None,
    reference_field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field of a right answer; else a usual one.")
    ] = None,
    skip_if: data_options.SkipIf = None,
    split: Annotated[
        str, typer.Option(metavar="LOW-HIGH", help="As in data; of multipart train, valid, test.")
    ] = "",
    limit: data_options.Limit = None,
    model: options.Model = DEFAULT_MODEL,
    method: options.Method = "auto",
    baseline: Baseline = None,
    without: Without = None,
    no_joins: Annotated[
        bool, typer.Option("--no-joins", help="Syncs neither wait nor join: main goes on blind.")
    ] = False,
    pairs: Annotated[int, typer.Option(help="Timed decodes a side and prompt; 0: none.")] = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    no_prompts: data_options.NoPrompts = False,
    judge: parts.JudgeName = None,
    judge_url: parts.JudgeUrl = None,
    as_json: parts.AsJson = False,
) -> None:
    """Answer a task's prompts by a model and by a baseline; time, score and keep every answer.

    The same command goes on where a killed run was.
    """
    from stretto.cli.bench_parts import check, prepare
    from stretto.errors import InvalidInput
    from stretto.eval.tasks import Source, get_task, load_prompts

    check(threads=threads)
    check(low=0, pairs=pairs, seed=seed)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    _check(method, dtype, engine)
    settings = None if judge is None else parts.judge_settings(judge, url=judge_url)
    if settings is not None and baseline == NO_BASELINE:
        raise InvalidInput("a judge compares with the baseline; leave out --judge or --baseline")
    chosen = get_task(task)
    source = Source(
        tuple(prompts or ()), prompt_field, reference_field, limit, seed, split,
        skip_if=tuple(skip_if or ()),
    )  # fmt: skip
    found = load_prompts(chosen, source)
    prepare(out)
    loader = Loader(dtype, device, engine, threads)
    names = Names(model, method, baseline, tuple(without or ()), not no_joins)
    sides = _load(loader, names)
    from stretto.eval.runner import Job

    job = Job(chosen, found, *sides, params=params, num_pairs=pairs, keeps_prompts=not no_prompts)
    config = _config(job, names, source, device)
    if settings is not None:
        parts.check_judge(settings, config)
    if not _evaluate(job, config, out, device):
        raise typer.Exit(INTERRUPTED)
    num_unjudged = 0
    if settings is not None:
        num_unjudged = parts.judge_run(out, settings, source.paths)
    _finish(out, None if settings is None else settings.kind, as_json, num_unjudged)


@dataclass(frozen=True)
class Loader:
    """Where models run."""

    dtype: str
    device: str
    engine: str
    threads: int | None

    def load(self, name: str) -> LM:
        from stretto.cli.answer import load
        from stretto.lm import DEFAULT_POOL_SLOTS

        return load(
            name,
            dtype=self.dtype,
            device=self.device,
            engine=self.engine,
            threads=self.threads,
            pool_slots=DEFAULT_POOL_SLOTS,
            page_size=1,
            offline=False,
        )


@dataclass(frozen=True)
class Names:
    """What was asked for. `baseline` None: the model's own weights."""

    model: str
    method: str
    baseline: str | None
    without: tuple[str, ...]
    joins: bool

    @property
    def baseline_model(self) -> str:
        return self.model if self.baseline is None else self.baseline


def _load(loader: Loader, names: Names) -> tuple[Contestant, Contestant | None]:
    """Both sides; one `LM` for both where they are one model."""
    from stretto.errors import InvalidInput
    from stretto.eval.answers import Contestant
    from stretto.eval.restricted import blind, without
    from stretto.methods import check_method

    lm = loader.load(names.model)
    check_method(names.method, lm.card.dialect)
    restricted = without(lm if names.joins else blind(lm), names.without)
    ours = Contestant(restricted, names.method)
    if names.baseline == NO_BASELINE:
        return ours, None
    other = lm if names.baseline_model == names.model else loader.load(names.baseline_model)
    if other.engine.name != lm.engine.name:
        raise InvalidInput(
            f"the two sides would run on different engines ({lm.engine.name} and "
            f"{other.engine.name}); name one with --engine"
        )
    return ours, Contestant(other, "sequential")


def _check(method: str, dtype: str, engine: str) -> None:
    """Raises for what cannot work, before anything is loaded."""
    from stretto.engines.choose import check_engine
    from stretto.errors import UnknownName
    from stretto.methods import check_method
    from stretto.models.loading import DTYPES

    check_method(method)
    check_engine(engine)
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, list(DTYPES))


def _config(job: Job, names: Names, source: Source, device: str) -> dict[str, Any]:
    """All that decides what is measured; two runs with the same one are the same run."""
    import torch

    from stretto.bench.program import Target
    from stretto.eval.identity import describe_side

    lm = job.ours.lm
    other = job.baseline
    return {
        "task": _task_config(job.task, job.prompts, source),
        "ours": describe_side(lm, names.model, names.method)
        | {"without": list(names.without), "joins": names.joins},
        "baseline": other and describe_side(other.lm, names.baseline_model, other.method),
        "sampling": {
            "max_tokens": job.params.max_tokens,
            "temperature": job.params.temperature,
            "seed": job.params.seed,
        },
        "place": {
            "engine": lm.engine.name,
            "dtype": Target.of(lm).dtype,
            "device": device,
            "torch_threads": torch.get_num_threads(),
        },
        "pairs": job.num_pairs,
        "keeps_prompts": job.keeps_prompts,
    }


def _task_config(task: Task, prompts: Prompts, source: Source) -> dict[str, Any]:
    return {
        "name": task.name,
        "version": task.version,
        "has_scores": task.score is not None,
        "num_prompts": len(prompts.items),
        "left_out": prompts.left_out,
        "digest": prompts.digest,
        "prompt_field": source.prompt_field,
        "reference_field": source.reference_field,
        "limit": source.limit,
        "split": source.split,
        "skip_if": list(source.skip_if),
    }


def _evaluate(job: Job, config: dict[str, Any], out: Path, device: str) -> bool:
    """Measures what is missing; whether all is there now."""
    from stretto.cli.output import interruptible, say
    from stretto.data.store import Store
    from stretto.eval import folder
    from stretto.eval.rows import EvalRow
    from stretto.eval.runner import evaluate

    for reason, count in job.prompts.left_out.items():
        say(f"left out by {reason}: {count}")
    folder.start(out, config)
    with Store(out / folder.ROWS, EvalRow) as store, interruptible() as is_interrupted:
        if len(store) == len(job.prompts.items):
            return True
        process = folder.add_environment(out, _environment(device))
        done = evaluate(job, store, process=process, report=say, is_interrupted=is_interrupted)
        if not done:
            say(f"interrupted after {len(store)} prompts; the same command goes on from there")
        return done


def _environment(device: str) -> dict[str, Any]:
    import shlex
    import sys
    from datetime import UTC, datetime

    from stretto.bench.machine import describe_machine

    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["stretto", *sys.argv[1:]]),
        "machine": describe_machine(device),
    }


def _finish(out: Path, kind: str | None, as_json: bool, num_unjudged: int) -> None:
    """Writes and shows the summary; exits with 3 if some prompts failed."""
    from stretto.cli.bench_parts import show
    from stretto.cli.output import say
    from stretto.eval.folder import load_run, unjudged_run
    from stretto.eval.summary import save_summary, text_of

    summary = save_summary(unjudged_run(out) if kind is None else load_run(out, kind))
    say(f"wrote {out}")
    show(summary if as_json else None, text_of(summary))
    if num_unjudged:
        say(f"{num_unjudged} prompts have no verdict")
    if summary["counts"]["failures"] or num_unjudged:
        raise typer.Exit(3)
