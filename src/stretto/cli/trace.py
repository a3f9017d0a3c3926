"""`stretto trace`: what an annotated text means. Needs no model and never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.dialects import DialectSettings
    from stretto.dialects.base import Parsed, Vocabulary

MAX_TAGS = 5000
MAX_BYTES = 64 << 20
"""A device or a wrong file ends here, and not where memory does."""

app = typer.Typer(no_args_is_help=True, help="Look at what an annotated text means.")


@app.callback()
def trace() -> None:
    """Look at what an annotated text means."""


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Annotated text; - is stdin.")],
    *,
    dialect: Annotated[str, typer.Option(help="pasta, tip, pasta+tip, planned, apar or plain.")],
    prompt: Annotated[str, typer.Option(help="The prompt, in which tags are inert.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="A tokenizer.json or its folder.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="predicted, overlap or fixed; predicted.")
    ] = None,
    unit: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens that a promise's number counts; 10.")
    ] = None,
    fixed_length: Annotated[
        int | None, typer.Option(metavar="N", help="Length under policy fixed; 50.")
    ] = None,
    registers: Annotated[
        int | None, typer.Option(metavar="N", help="How many registers there are; 16.")
    ] = None,
    grace: Annotated[
        bool | None,
        typer.Option("--grace/--strict", help="Whether a register sees the step it kills; strict."),
    ] = None,
    dense: Annotated[
        bool | None,
        typer.Option("--dense/--sparse", help="Whether spans of a plan see one another; sparse."),
    ] = None,
) -> None:
    """Parse an annotated text and show its threads, what they see, and what it costs.

    Exits with 0 whatever the issues in the text.
    """
    variant = None if dense is None else "dense" if dense else "sparse"
    given = {
        "policy": policy, "unit": unit, "fixed_length": fixed_length,
        "num_registers": registers, "grace": grace, "variant": variant,
    }  # fmt: skip
    from stretto.cli.inputs import check_utf8, read_text
    from stretto.cli.output import write_json
    from stretto.dialects import get_dialect

    chosen = get_dialect(dialect)
    settings = _settings(dialect, {k: v for k, v in given.items() if v is not None})
    check_utf8("--prompt", prompt)
    vocabulary = _vocabulary(tokenizer, chosen.forms(settings))
    text = read_text(file, MAX_BYTES)
    _check_size(text)
    parsed = chosen.parse_text(text, vocabulary, settings, prompt)
    if as_json:
        write_json(describe(dialect, parsed, vocabulary))
        return
    from stretto.cli.trace_view import print_view

    print_view(dialect, parsed, vocabulary, text)


def _check_size(text: str) -> None:
    """Refuses a text whose table of who sees whom, which grows with the square, has no end."""
    from stretto.errors import InvalidInput

    count = sum(text.count(tag) for tag in ("<promise", "<sync", "<fork", "<reg_"))
    if count > MAX_TAGS:
        raise InvalidInput(f"the text has {count} tags; split it into parts of up to {MAX_TAGS}")


def describe(dialect: str, parsed: Parsed, vocabulary: Vocabulary) -> dict[str, Any]:
    """The object that `--json` prints."""
    from stretto.trace import live_tokens

    trace = parsed.trace
    live = live_tokens(trace)
    segments = [
        {
            "id": s.id,
            "thread": s.thread,
            "kind": s.kind,
            "role": s.role,
            "sees": sorted(s.sees),
            "tokens": [vocabulary.decode([token]) for token in s.tokens],
            "positions": list(s.positions),
        }
        for s in trace.segments
    ]
    return {
        "dialect": dialect,
        "segments": segments,
        "num_tokens": trace.num_tokens,
        "critical_path_steps": trace.critical_path_steps,
        "parallelism": trace.parallelism,
        "live_tokens": {
            "mean": live.mean,
            "peak": live.peak,
            "generated_mean": live.generated_mean,
            "generated_peak": live.generated_peak,
        },
        "text": parsed.text,
        "issues": [{"code": issue.code, "at": issue.at} for issue in parsed.issues],
    }


OWNERS = {
    "policy": ("--policy", ("pasta",)),
    "unit": ("--unit", ("pasta", "planned")),
    "fixed_length": ("--fixed-length", ("pasta",)),
    "num_registers": ("--registers", ("tip",)),
    "grace": ("--grace/--strict", ("tip",)),
    "variant": ("--dense/--sparse", ("planned",)),
}
"""Of a setting of dialects: its option, and the dialects, or parts of one, that read it."""


def _settings(dialect: str, given: Mapping[str, Any]) -> DialectSettings:
    """The settings that options ask for, those not given at their defaults. Raises `InvalidInput`
    for one that is out of range, or that the dialect would pass over."""
    from stretto.dialects import DialectSettings
    from stretto.dialects.pasta import Policy
    from stretto.dialects.registers import MAX_REGISTERS
    from stretto.dialects.tags import MAX_PROMISED_TOKENS
    from stretto.errors import InvalidInput, UnknownName

    for name in given:
        option, owners = OWNERS[name]
        if not {*owners} & {*dialect.split("+")}:
            raise InvalidInput(
                f"{option} is of dialect {' and '.join(owners)}, not of {dialect}; leave it out"
            )
    policy = given.get("policy")
    if policy is not None and policy not in get_args(Policy):
        raise UnknownName("policy", policy, list(get_args(Policy)))
    most = {
        "unit": MAX_PROMISED_TOKENS,
        "fixed_length": MAX_PROMISED_TOKENS,
        "num_registers": MAX_REGISTERS,
    }
    for name, largest in most.items():
        if not 1 <= given.get(name, 1) <= largest:
            option, value = OWNERS[name][0], given[name]
            raise InvalidInput(f"{option} is {value}; give a number from 1 to {largest}")
    if "fixed_length" in given and policy != "fixed":
        raise InvalidInput("--fixed-length is of policy fixed; give --policy fixed too")
    return DialectSettings.given(given)


def _vocabulary(tokenizer: str | None, control_forms: Any) -> Vocabulary:
    if tokenizer is None:
        from stretto.dialects.words import WordsVocabulary

        return WordsVocabulary(control_forms)
    from pathlib import Path

    from stretto.tokens import load_vocabulary

    return load_vocabulary(Path(tokenizer), control_forms)
