"""`stretto chat`: a conversation on the terminal, with threads that decode in parallel."""

from __future__ import annotations

import typer

from stretto.cli import options
from stretto.models.shipped import DEFAULT_MODEL
from stretto.params import SamplingParams

DEFAULTS = SamplingParams()
DEFAULT_POOL_SLOTS = 8192


def chat(
    *,
    system: options.System = None,
    method: options.Method = "auto",
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    engine: options.Engine = "auto",
    threads: options.Threads = None,
    page_size: options.PageSize = 1,
    pool_slots: options.PoolSlots = DEFAULT_POOL_SLOTS,
    no_prefix_cache: options.NoPrefixCache = False,
    offline: options.Offline = False,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = DEFAULTS.temperature,
    top_k: options.TopK = DEFAULTS.top_k,
    top_p: options.TopP = DEFAULTS.top_p,
    repetition_penalty: options.RepetitionPenalty = DEFAULTS.repetition_penalty,
    stop: options.Stop = None,
    seed: options.Seed = DEFAULTS.seed,
    max_thread_tokens: options.MaxThreadTokens = None,
    max_forks: options.MaxForks = DEFAULTS.max_forks,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Chat with a model: a message a line, /help for commands, Ctrl-C cancels an answer.

    Answers go to stdout, all else to stderr. Messages may be piped in, too.
    """
    from stretto.cli.run import check, check_numbers

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
        max_thread_tokens=max_thread_tokens,
        max_forks=max_forks,
    )
    check_numbers(threads, page_size, pool_slots, 1)
    check(method, dtype, engine, None)
    _check_system(system)
    from stretto.cli.answer import load
    from stretto.cli.chat_input import Messages
    from stretto.cli.chat_loop import Chat, Settings
    from stretto.cli.output import say
    from stretto.errors import Unsupported
    from stretto.methods import extras

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
        prefix_cache=not no_prefix_cache,
    )
    if not lm.has_chat_template:
        raise Unsupported(f"model {lm.name!a} has no chat template; use `stretto run --raw`")
    messages = Messages()
    if messages.is_terminal and not quiet:
        say(f"{lm.name}; /help lists the commands, Ctrl-D ends the chat")
    settings = Settings(params, method, system, as_json, quiet)
    raise typer.Exit(Chat(lm, settings, messages).run())


def _check_system(system: str | None) -> None:
    from stretto.cli.inputs import check_utf8

    if system is not None:
        check_utf8("--system", system)
