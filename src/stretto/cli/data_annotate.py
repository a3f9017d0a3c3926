"""`stretto data annotate`: an annotator over responses, into a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_options, teacher_options
from stretto.cli.data_job import Job, make

if TYPE_CHECKING:
    from stretto.cli.data_progress import Progress
    from stretto.data.check import Checker
    from stretto.data.items import Item
    from stretto.data.select import Selection

RUN, LEDGER = "run.json", "ledger.json"


def annotate(
    files: teacher_options.Responses,
    *,
    annotator: Annotated[str, typer.Option(help="teacher, structure, likelihood or apar.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Rows are appended in this folder.")],
    prompts: teacher_options.Prompts = None,
    prompt_field: data_options.PromptField = None,
    response_field: data_options.ResponseField = None,
    skip_if: data_options.SkipIf = None,
    split: data_options.Split = "0-100",
    limit: data_options.Limit = None,
    keep_unfinished: Annotated[
        bool, typer.Option("--keep-unfinished", help="Also answers that were cut off.")
    ] = False,
    no_prompts: data_options.NoPrompts = False,
    model: teacher_options.Model = None,
    tokenizer: data_options.Tokenizer = None,
    unit: data_options.Unit = 10,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Of the annotator; repeatable."),
    ] = None,
    base_url: teacher_options.BaseUrl = None,
    key_env: teacher_options.KeyEnv = "OPENAI_API_KEY",
    temperature: teacher_options.Temperature = 0.0,
    max_tokens: teacher_options.MaxTokens = 4096,
    concurrency: teacher_options.Concurrency = 8,
    timeout: teacher_options.Timeout = 120.0,
    attempts: teacher_options.Attempts = 6,
    price_in: teacher_options.PriceIn = None,
    price_out: teacher_options.PriceOut = None,
    cap: teacher_options.Cap = None,
    as_json: data_options.AsJson = False,
    quiet: data_options.Quiet = False,
) -> None:
    """Annotate responses. The same command goes on where it ended and pays for nothing twice.

    Exits with 3 if responses were rejected or are left.
    """
    from stretto.cli.output import say
    from stretto.data.check import load_checker

    job = Job(
        annotator, model, base_url, key_env, temperature, max_tokens, concurrency, timeout,
        attempts, price_in, price_out, cap, unit, tokenizer, tuple(setting or ()),
    )  # fmt: skip
    job.check()
    chosen = data_options.selection(split, skip_if, limit)
    items, left_out = read_items(
        files,
        prompts or [],
        prompt_field=prompt_field,
        response_field=response_field,
        chosen=chosen,
        keep_unfinished=keep_unfinished,
    )
    checker = load_checker(tokenizer, dialect=job.dialect, unit=unit)
    result, code = run_job(job, items, checker, out, keep_prompts=not no_prompts, quiet=quiet)
    data_options.show(result | {"left_out": left_out, "folder": str(out)}, as_json)
    num_cut = sum(n for reason, n in left_out.items() if reason.startswith("ended with "))
    if num_cut and not quiet:
        say(f"{num_cut} answers were cut short and left out; --keep-unfinished keeps such")
    raise typer.Exit(code)


def read_items(
    files: list[Path],
    prompts: list[Path],
    *,
    prompt_field: str | None,
    response_field: str | None,
    chosen: Selection,
    keep_unfinished: bool,
) -> tuple[list[Item], dict[str, int]]:
    """The responses of the files, sampled answers or users' rows, and what was left out."""
    from collections import Counter

    from stretto.data.items import items_of_answers, items_of_sources
    from stretto.data.rows import Answer, PromptBook, Source, read_rows, read_sources
    from stretto.data.select import select

    sampled = [file for file in files if data_options.holds_answers(file)]
    others = [file for file in files if file not in sampled]
    book = PromptBook.read(prompts, prompt_field=prompt_field)
    answers = [row for file in sampled for row in read_rows(file, Answer)]
    items, left_out = items_of_answers(answers, book, keep_unfinished=keep_unfinished)
    fields = {row.key: row.model_dump(include=set(chosen.skip_if)) for row in answers}
    known = [
        Source(prompt=i.prompt, response=i.response, name=i.key, fields=fields[i.key])
        for i in items
    ]
    kept, reasons = select(known, chosen)
    names = {source.name for source in kept}
    items = [item for item in items if item.key in names]
    sources = read_sources(
        others,
        prompt_field=prompt_field,
        response_field=response_field,
        keep_fields=chosen.skip_if,
    )
    selected, more_reasons = select(sources, chosen)
    more, more_left_out = items_of_sources(selected)
    total: Counter[str] = Counter()
    for counts in (left_out, reasons, more_reasons, more_left_out):
        total.update(counts)
    taken = {item.key: item.response for item in items}
    fresh = [item for item in more if item.key not in taken]
    total.update(
        "repeated" if taken[item.key] == item.response else "an answer has its key"
        for item in more
        if item.key in taken
    )
    return [*items, *fresh], {reason: count for reason, count in total.items() if count}


def run_job(
    job: Job, items: list[Item], checker: Checker, out: Path, *, keep_prompts: bool, quiet: bool
) -> tuple[dict[str, Any], int]:
    """Annotates what is left; summary and exit status."""
    from stretto.cli.data_progress import Progress
    from stretto.cli.output import interruptible
    from stretto.data.annotate import ANNOTATED, REJECTS, annotate_into
    from stretto.data.settings import hold_to
    from stretto.files import write_atomically

    def hold() -> None:
        files = (out / ANNOTATED, out / REJECTS)
        has_rows = any(os.path.exists(file) and os.path.getsize(file) for file in files)
        hold_to(out / RUN, job.identity(), str(out), has_rows=has_rows)

    if os.path.exists(out / RUN):  # False, not an error, for a name too long to be a path
        hold()
    annotator = make(job, checker, out)
    ledger: Callable[[], dict[str, Any]] = getattr(annotator, "ledger", dict)
    try:
        hold()
        with Progress(quiet=quiet) as progress, interruptible() as is_interrupted:
            watcher = _Watcher(progress, is_interrupted, ledger)
            report = annotate_into(
                out, items, annotator, checker, keep_prompts=keep_prompts, watcher=watcher
            )
    finally:
        book = ledger()
        if book:
            with suppress(OSError):  # raw.jsonl has it all
                write_atomically(out / LEDGER, (json.dumps(book, indent=2) + "\n").encode())
        getattr(annotator, "close", lambda: None)()
    result = report.to_json()
    return (result | {"ledger": book} if book else result), report.exit_code


@dataclass
class _Watcher:
    """Shows progress, and hears Ctrl-C."""

    shown: Progress
    heard: Callable[[], bool]
    ledger: Callable[[], dict[str, Any]]

    def progress(self, num_done: int, num_todo: int, num_rejected: int) -> None:
        if self.shown.is_due():
            book = self.ledger()
            cost = f", cost {book['total_cost']:.4f}" if book else ""
            self.shown.update(f"{num_done}/{num_todo} responses, {num_rejected} rejected{cost}")

    def is_interrupted(self) -> bool:
        return self.heard()
