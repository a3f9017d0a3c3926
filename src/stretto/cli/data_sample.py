"""`stretto data sample`: answers from a model, many prompts at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_options, options
from stretto.errors import INTERRUPTED, SOME_FAILED
from stretto.files import beside
from stretto.models.embedded import EMBEDDED_MODEL
from stretto.params import SamplingParams

if TYPE_CHECKING:
    from stretto.data.rows import Answer, Reject
    from stretto.data.sample import Tally, Task
    from stretto.data.store import Store
    from stretto.lm import LM

DEFAULTS = SamplingParams(max_tokens=512, temperature=1.0)
DEFAULT_POOL_SLOTS = 16384


def sample(
    *,
    prompts: data_options.Prompts,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Answers are appended here, JSONL.")],
    prompt_field: data_options.PromptField = None,
    skip_if: data_options.SkipIf = None,
    split: data_options.Split = "0-100",
    limit: data_options.Limit = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Skip prompts of more tokens.")
    ] = None,
    n: Annotated[int, typer.Option(help="Answers of each prompt.")] = 1,
    batch: Annotated[int, typer.Option(metavar="N", help="Requests under way at once.")] = 32,
    no_prompts: data_options.NoPrompts = False,
    no_logprobs: Annotated[
        bool, typer.Option("--no-logprobs", help="Leave log-probabilities out.")
    ] = False,
    method: options.Method = "auto",
    model: options.Model = EMBEDDED_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    pool_slots: options.PoolSlots = DEFAULT_POOL_SLOTS,
    offline: options.Offline = False,
    max_tokens: options.MaxTokens = DEFAULTS.max_tokens,
    temperature: options.Temperature = DEFAULTS.temperature,
    top_k: options.TopK = DEFAULTS.top_k,
    top_p: options.TopP = DEFAULTS.top_p,
    seed: options.Seed = DEFAULTS.seed,
    as_json: data_options.AsJson = False,
    quiet: data_options.Quiet = False,
) -> None:
    """Sample answers to prompts, appended to a file. The same command goes on where it ended.

    Exits with 3 if there are prompts that cannot be answered; they are in FILE.rejects.jsonl.
    """
    from stretto.cli.run import check, check_numbers
    from stretto.data.rows import read_sources
    from stretto.data.select import select

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    check_numbers(threads, 1, pool_slots, 1)
    check(method, dtype, engine, None)
    data_options.check(n=n, batch=batch, max_prompt_tokens=max_prompt_tokens)
    chosen = data_options.selection(split, skip_if, limit)
    sources = read_sources(prompts, prompt_field=prompt_field, keep_fields=chosen.skip_if)
    from stretto.cli.answer import load

    lm = load(
        model, dtype=dtype, device=device, engine=engine, threads=threads, pool_slots=pool_slots,
        page_size=1, offline=offline, quiet=quiet,
    )  # fmt: skip
    selected, left_out = select(sources, chosen, _fits(lm, max_prompt_tokens))
    texts = [source.prompt for source in selected]
    job = Job(out, params, method, dtype, model, n, batch, not no_prompts, not no_logprobs, quiet)
    code, result = run_job(lm, texts, job)
    data_options.show(result | {"left_out": left_out, "file": str(out)}, as_json)
    if not quiet:
        say_cut(result["finish_reasons"].get("length", 0), max_tokens)
    raise typer.Exit(code)


def say_cut(num_cut: int, max_tokens: int) -> None:
    """Answers without an end of their own are of little use later; better to know it now."""
    from stretto.cli.output import say

    if num_cut:
        say(
            f"{num_cut} answers were cut short (--max-tokens {max_tokens}): data annotate leaves "
            "such out; with a larger --max-tokens more of them end"
        )


@dataclass(frozen=True)
class Job:
    """What `sample` was asked for."""

    out: Path
    params: SamplingParams
    method: str
    dtype: str
    model: str
    n: int
    batch: int
    keep_prompts: bool
    keep_logprobs: bool
    quiet: bool = False

    @property
    def rejects(self) -> Path:
        return beside(self.out, "rejects.jsonl")

    @property
    def settings(self) -> Path:
        return beside(self.out, "run.json")


def _fits(lm: LM, max_prompt_tokens: int | None) -> Callable[[str], bool] | None:
    """Whether a prompt has few enough tokens. One that cannot be encoded passes: it is told, and
    kept as a reject, when it is to be answered."""
    from stretto.errors import InvalidInput

    if max_prompt_tokens is None:
        return None

    def fits(prompt: str) -> bool:
        try:
            return len(lm.encode(lm.chat(prompt))) <= max_prompt_tokens
        except InvalidInput:
            return True

    return fits


def run_job(lm: LM, texts: list[str], job: Job) -> tuple[int, dict[str, Any]]:
    """Samples what is not in the files yet; exit status and summary."""
    from stretto.data.rows import Answer, Reject
    from stretto.data.sample import Tally, tasks_of
    from stretto.data.settings import hold_to
    from stretto.data.store import Store

    all_tasks = tasks_of(texts, job.n)
    tally = Tally()
    with Store(job.out, Answer) as answers, Store(job.rejects, Reject) as rejects:
        hold_to(
            job.settings, _settings(lm, job), str(job.out), {"model": job.model},
            has_rows=bool(len(answers) or len(rejects)),
        )  # fmt: skip
        tasks = [t for t in all_tasks if t.key not in answers and t.key not in rejects]
        is_stopped = _sample(lm, tasks, job, tally, lambda row: _add(row, answers, rejects))
        left = [t for t in all_tasks if t.key not in answers and t.key not in rejects]
        num_rejects = sum(t.key in rejects for t in all_tasks)
        result = {
            "asked_for": len(all_tasks),
            "before": len(all_tasks) - len(tasks),
            **tally.to_json(),
            "rejected": num_rejects,
            "left": len(left),
        }
    if is_stopped:
        return INTERRUPTED, result
    return (SOME_FAILED if num_rejects else 0), result


def _add(row: Answer | Reject, answers: Store[Answer], rejects: Store[Reject]) -> None:
    from stretto.data.rows import Answer

    if isinstance(row, Answer):
        answers.add(row)
    else:
        rejects.add(row)


def _sample(
    lm: LM, tasks: list[Task], job: Job, tally: Tally, keep: Callable[[Answer | Reject], None]
) -> bool:
    """Keeps each answer as soon as it is done. Whether Ctrl-C ended it early."""
    from stretto.cli.data_progress import Progress
    from stretto.cli.output import interruptible
    from stretto.data.sample import sample_answers

    with Progress(quiet=job.quiet) as progress, interruptible() as is_interrupted:
        rows = sample_answers(
            lm,
            tasks,
            job.params,
            method=job.method,
            batch=job.batch,
            keep_prompts=job.keep_prompts,
            keep_logprobs=job.keep_logprobs,
            report=lambda drawn: _report(progress, tally, len(tasks), drawn, is_interrupted),
        )
        try:
            for row in rows:
                keep(row)
                tally.add(row)
        except _Stopped:
            return True
    return False


class _Stopped(Exception):
    """Ctrl-C: what is under way is cancelled, what is done is on disk."""


def _report(progress: Any, tally: Tally, num_tasks: int, drawn: int, is_interrupted: Any) -> None:
    if is_interrupted():
        raise _Stopped
    if progress.is_due():
        done = tally.num_answers + tally.num_rejected
        rate = drawn / tally.seconds if tally.seconds > 0 else 0.0
        progress.update(f"{done}/{num_tasks} answers, {drawn:,} tokens, {rate:.1f} tokens/s")


def _settings(lm: LM, job: Job) -> dict[str, Any]:
    """What decides an answer besides its prompt and number."""
    params = job.params
    return {
        "model": _model_id(lm, job.model),
        "method": job.method,
        "engine": lm.engine.name,
        "dtype": job.dtype,
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
    }


def _model_id(lm: LM, name: str) -> str:
    """A fingerprint of the model's files, so that a model trained in place counts as another."""
    from stretto.models import resolve
    from stretto.models.fingerprint import fingerprint

    path = Path(name).expanduser()
    folder = path if path.is_dir() else resolve(name, offline=True).path
    return fingerprint(folder)
