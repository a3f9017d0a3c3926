"""`stretto data convert`: annotated rows of one dialect in the form of another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import data_options
from stretto.errors import SOME_FAILED

FORMS = ("planned",)


def convert(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSONL of pasta rows.")],
    *,
    to: Annotated[str, typer.Option("--to", help="planned.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The rows, JSONL.")],
    tokenizer: data_options.Tokenizer = None,
    unit: data_options.Unit = 10,
    no_topics: Annotated[
        bool, typer.Option("--no-topics", help="Leave out what spans are about.")
    ] = False,
    one_round: Annotated[
        bool, typer.Option("--one-round", help="Leave out syncs: one round a row.")
    ] = False,
    no_prompts: data_options.NoPrompts = False,
    as_json: data_options.AsJson = False,
    quiet: data_options.Quiet = False,
) -> None:
    """Write annotated rows in planned form: all text in spans, each promised as long as it is.

    The same command makes the same files. Exits with 3 if rows cannot be converted; they are in
    FILE.rejects.jsonl.
    """
    from stretto.cli.data_progress import Progress
    from stretto.cli.output import check_writable, write_rows
    from stretto.data.check import count_codes, load_checker
    from stretto.data.convert import PlannedForm, converted
    from stretto.data.rows import Annotated as AnnotatedRow
    from stretto.data.rows import Reject, read_rows
    from stretto.errors import InvalidInput, UnknownName

    if to not in FORMS:
        raise UnknownName("form", to, list(FORMS))
    check_writable(out, "--out")
    rejects_at = out.with_name(f"{out.name}.rejects.jsonl")
    checker = load_checker(tokenizer, dialect="planned", unit=unit)
    form = PlannedForm(unit, topics=not no_topics, rounds=not one_round)
    rows: list[AnnotatedRow] = []
    rejects: list[Reject] = []
    keys: set[str] = set()
    with Progress(quiet=quiet) as progress:
        for file in files:
            if data_options.holds_answers(file):
                raise InvalidInput(f"{file} holds sampled answers; annotate them first")
            for row in read_rows(file, AnnotatedRow):
                if row.key in keys:
                    raise InvalidInput(f"{file} has row {row.key} again; give each row once")
                keys.add(row.key)
                made = converted(row, checker, form)
                if isinstance(made, Reject):
                    rejects.append(made)
                else:
                    rows.append(made.model_copy(update={"prompt": None}) if no_prompts else made)
                progress.update(f"{len(keys)} rows, {len(rejects)} rejected")
    write_rows(out, rows)
    if rejects or rejects_at.exists():
        write_rows(rejects_at, rejects)
    facts = {
        "rows": len(rows),
        "rejected": count_codes([reject.reasons for reject in rejects]),
        "spans": sum(row.details["spans"] for row in rows),
        "rounds": sum(row.details["rounds"] for row in rows),
        "file": str(out),
    }
    data_options.show(facts, as_json)
    raise typer.Exit(SOME_FAILED if rejects else 0)
