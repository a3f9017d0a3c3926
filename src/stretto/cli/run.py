"""`stretto run`: answer a prompt, with threads that decode in parallel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stretto.cli import options
from stretto.models.shipped import DEFAULT_MODEL
from stretto.params import SamplingParams

if TYPE_CHECKING:
    from stretto.lm import Prompt

DEFAULTS = SamplingParams()
DEFAULT_POOL_SLOTS = 8192


def run(
    prompt: options.Prompt = None,
    *,
    file: options.File = None,
    system: options.System = None,
    raw: options.Raw = False,
    method: options.Method = "auto",
    budget: options.Budget = None,
    pin_prompt: options.PinPrompt = False,
    policy_page: options.PolicyPage = None,
    sinks: options.Sinks = None,
    reindexed: options.Reindexed = False,
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    page_size: options.PageSize = 1,
    pool_slots: options.PoolSlots = DEFAULT_POOL_SLOTS,
    offline: options.Offline = False,
    max_tokens: options.MaxTokens = DEFAULTS.max_tokens,
    temperature: options.Temperature = DEFAULTS.temperature,
    top_k: options.TopK = DEFAULTS.top_k,
    top_p: options.TopP = DEFAULTS.top_p,
    repetition_penalty: options.RepetitionPenalty = DEFAULTS.repetition_penalty,
    stop: options.Stop = None,
    stop_id: options.StopId = None,
    seed: options.Seed = DEFAULTS.seed,
    max_thread_tokens: options.MaxThreadTokens = None,
    max_forks: options.MaxForks = DEFAULTS.max_forks,
    order: options.Order = DEFAULTS.order,
    steps_ratio: options.StepsRatio = DEFAULTS.steps_ratio,
    threshold: options.Threshold = DEFAULTS.threshold,
    length_scale: options.LengthScale = DEFAULTS.length_scale,
    early_finish: options.EarlyFinish = DEFAULTS.early_finish,
    max_rounds: options.MaxRounds = DEFAULTS.max_rounds,
    variant: options.Variant = None,
    convention: options.Convention = None,
    as_json: options.AsJson = False,
    compare: options.Compare = False,
    pairs: options.Pairs = 1,
    trace: options.Trace = None,
    quiet: options.Quiet = False,
) -> None:
    """Answer a prompt. Threads that the method forks decode in parallel, in colours of their own.

    The answer goes to stdout, all else to stderr. Ctrl-C keeps what there is and exits with 130.
    """
    from stretto.cli.answer import Job, answer, load
    from stretto.methods import extras

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        stop_ids=frozenset(stop_id or ()),
        seed=seed,
        max_thread_tokens=max_thread_tokens,
        max_forks=max_forks,
        order=order,
        steps_ratio=steps_ratio,
        threshold=threshold,
        length_scale=length_scale,
        early_finish=early_finish,
        max_rounds=max_rounds,
        variant=variant,
        convention=convention,
    )
    check_numbers(threads, page_size, pool_slots, pairs)
    method = options.spelled(
        method, budget=budget, pin_prompt=pin_prompt, policy_page=policy_page, sinks=sinks,
        reindexed=reindexed,
    )  # fmt: skip
    check(method, dtype, engine, trace)
    asked = _prompt(prompt, file, system, raw)
    job = Job(asked, params, method, raw, pairs if compare else 0, as_json, quiet, trace)
    lm = load(
        model,
        dtype=dtype,
        device=device,
        engine=engine,
        threads=threads,
        pool_slots=pool_slots,
        page_size=page_size,
        offline=offline,
        quiet=quiet,
        extras=extras(method),
    )
    raise typer.Exit(answer(lm, job))


def _prompt(prompt: str | None, file: Path | None, system: str | None, raw: bool) -> Prompt:
    from stretto.cli.inputs import check_utf8, read_prompt
    from stretto.errors import InvalidInput

    if system is not None and raw:
        raise InvalidInput("--system needs the chat template; leave out --raw or --system")
    text = read_prompt(prompt, file)
    if system is None:
        return text
    check_utf8("--system", system)
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def check_numbers(threads: int | None, page_size: int, pool_slots: int, pairs: int) -> None:
    """Raises `InvalidInput` for a number that is too small."""
    from stretto.errors import InvalidInput

    numbers = (
        ("--threads", threads, 1),
        ("--page-size", page_size, 1),
        ("--pool-slots", pool_slots, 2),
        ("--pairs", pairs, 1),
    )
    for name, value, least in numbers:
        if value is not None and value < least:
            raise InvalidInput(f"{name} must be at least {least}, got {value}")
    if page_size > pool_slots:
        raise InvalidInput(f"--page-size {page_size} exceeds --pool-slots {pool_slots}; lower it")


def check(method: str, dtype: str, engine: str, trace: Path | None) -> None:
    """Raises for what cannot work, before anything heavy is imported or loaded."""
    from stretto.cli.output import check_writable
    from stretto.engines.choose import check_engine
    from stretto.errors import UnknownName
    from stretto.methods import check_method
    from stretto.models.loading import DTYPES

    check_method(method)
    check_engine(engine)
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, list(DTYPES))
    if trace is not None:
        check_writable(trace, "--trace")
