"""`stretto eval budget`: what a policy must be given to hold as much as a run's answers held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import eval_parts as parts

if TYPE_CHECKING:
    from stretto.eval.budgets import Length
    from stretto.eval.folder import Run
    from stretto.eval.rows import Answered

COUNTED = ("generated", "all")
SIDES = ("ours", "baseline")
DEFAULT_SINKS = 4


def eval_budget(
    folder: parts.Folder,
    *,
    method: Annotated[
        str, typer.Option(metavar="METHOD", help="Without a budget, as streaming_llm,pin_prompt.")
    ],
    counted: Annotated[
        str, typer.Option(help="What is to be equal: generated tokens, or all, with the prompt's.")
    ] = "generated",
    lengths: Annotated[
        str, typer.Option(help="Whose answers' lengths to reckon with: ours or baseline.")
    ] = "ours",
    as_json: parts.AsJson = False,
) -> None:
    """Find the budget with which a policy holds as many tokens as a run's answers do on average."""
    from stretto.cli.bench_parts import show
    from stretto.errors import UnknownName
    from stretto.eval.budgets import budget_for, mean_live
    from stretto.eval.folder import unjudged_run
    from stretto.methods.spelling import spell

    if counted not in COUNTED:
        raise UnknownName("count", counted, list(COUNTED))
    if lengths not in SIDES:
        raise UnknownName("side", lengths, list(SIDES))
    is_generated = counted == "generated"
    name, settings = _policy(method, is_generated)
    run = unjudged_run(folder)
    target = _held(run, is_generated)
    sizes = [_length(a, name, settings) for a in _answers(run, lengths)]
    budget = budget_for(target, sizes, generated=is_generated)
    means = [mean_live(budget, size, generated=is_generated) for size in sizes if size.tokens]
    result = {
        "method": spell(name, {"budget": budget} | settings),
        "budget": budget,
        "target": target,
        "mean": sum(means) / len(means),
        "answers": len(means),
    }
    text = f"{result['method']} holds {result['mean']:.1f} tokens on average; the run {target:.1f}"
    show(result if as_json else None, text)


def _policy(method: str, is_generated: bool) -> tuple[str, dict[str, Any]]:
    """The method's name and settings. Raises `InvalidInput` where nothing can be reckoned."""
    from stretto.errors import InvalidInput
    from stretto.methods.spelling import evicting, read

    name, settings = read(method)
    if "budget" in settings:
        raise InvalidInput(f"method {method!r} has a budget, which is what is looked for; leave it")
    _check_name(name)
    evicting(name, {"budget": 1024} | settings)
    if is_generated and name in ("paged_h2o", "random_evict") and "pin_prompt" not in settings:
        raise InvalidInput(
            f"how much of the prompt {name} keeps is not known before; add pin_prompt, or give "
            "--counted all"
        )
    return name, settings


def _check_name(name: str) -> None:
    from stretto.errors import UnknownName
    from stretto.methods import EVICTING

    if name not in EVICTING:
        raise UnknownName("policy", name, list(EVICTING))


def _answers(run: Run, side: str) -> list[Answered]:
    """Those answers of a side that tell what they held. Raises `InvalidInput` for none."""
    from stretto.errors import InvalidInput

    answers = [a for row in run.rows if (a := getattr(row, side)) is not None and a.live]
    if not answers:
        raise InvalidInput(f"no answer of {run.path} ({side}) tells what it held; run it again")
    return answers


def _held(run: Run, is_generated: bool) -> float:
    """The mean over prompts of what our side's answers held."""
    from stretto.errors import InvalidInput
    from stretto.eval.live import live_means
    from stretto.eval.summary import figures, prompt_figures

    name = "live_generated" if is_generated else "live"
    value = live_means(prompt_figures(run, figures(run)), 0)[name].value
    if value is None:
        raise InvalidInput(f"no answer of {run.path} tells what it held; run it again")
    return value


def _length(answer: Answered, name: str, settings: dict[str, Any]) -> Length:
    from stretto.eval.budgets import Length

    tokens = 0 if answer.live is None else round(2 * answer.live.dense_generated_mean - 1)
    prompt = answer.prompt_tokens
    sinks = settings.get("sinks", DEFAULT_SINKS) if name == "streaming_llm" else 0
    held = prompt if "pin_prompt" in settings else min(sinks, prompt)
    return Length(prompt, max(0, tokens), held)
