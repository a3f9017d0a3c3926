"""`stretto data graphs`: what the steps of responses read, found by a teacher or by likelihood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_options, teacher_options
from stretto.cli.data_annotate import read_items

if TYPE_CHECKING:
    from stretto.data.graph_find import Finder
    from stretto.data.items import Item

RAW, RUN = "raw.jsonl", "run.json"


def graphs(
    files: teacher_options.Responses,
    *,
    by: Annotated[str, typer.Option(help="teacher or likelihood.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Graphs are appended here, JSONL.")],
    cut: Annotated[
        str, typer.Option(help="A step is one of lines, paragraphs or sentences.")
    ] = "lines",
    steps: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Graphs whose steps are taken instead.")
    ] = None,
    prompts: teacher_options.Prompts = None,
    prompt_field: data_options.PromptField = None,
    response_field: data_options.ResponseField = None,
    limit: data_options.Limit = None,
    model: teacher_options.Model = None,
    max_loss: Annotated[
        float, typer.Option(metavar="X", help="Of likelihood: nats that a step may lose.")
    ] = 1.0,
    base_url: teacher_options.BaseUrl = None,
    key_env: teacher_options.KeyEnv = "OPENAI_API_KEY",
    temperature: teacher_options.Temperature = 0.0,
    max_tokens: teacher_options.MaxTokens = 4096,
    concurrency: teacher_options.Concurrency = 8,
    price_in: teacher_options.PriceIn = None,
    price_out: teacher_options.PriceOut = None,
    cap: teacher_options.Cap = None,
    as_json: data_options.AsJson = False,
    quiet: data_options.Quiet = False,
) -> None:
    """Find what each step of responses reads, for `stretto data registers`.

    The same command goes on where it ended. Exits with 3 if responses were rejected or are left;
    rejects are in FILE.rejects.jsonl.
    """
    from stretto.data.graph_find import check_finder

    check_finder(by)
    teaching = {
        "base_url": base_url, "price_in": price_in, "price_out": price_out, "cap": cap,
    }  # fmt: skip
    _check(by, model, teaching, max_loss)
    data_options.check(concurrency=concurrency, max_tokens=max_tokens)
    items, left_out = read_items(
        files,
        prompts or [],
        prompt_field=prompt_field,
        response_field=response_field,
        chosen=data_options.selection("0-100", None, limit),
        keep_unfinished=False,
    )
    identity: dict[str, Any] = {"by": by, "model": model, "cut": cut}
    if by == "likelihood":
        identity["max_loss"] = max_loss
    else:
        identity |= {"base_url": base_url, "temperature": temperature}

    def opened() -> Finder:
        if by == "likelihood":
            return _likelihood(model, max_loss)
        return _asker(
            out, teaching, model=model, key_env=key_env, temperature=temperature,
            max_tokens=max_tokens, concurrency=concurrency,
        )  # fmt: skip

    result, code = _run(items, opened, out, identity=identity, cut=cut, steps=steps, quiet=quiet)
    data_options.show(result | {"left_out": left_out, "file": str(out)}, as_json)
    raise typer.Exit(code)


def _check(by: str, model: str | None, teaching: dict[str, Any], max_loss: float) -> None:
    from stretto.errors import InvalidInput

    if by == "teacher" and model is None:
        raise InvalidInput("--by teacher needs --model, the name the endpoint knows")
    if by == "likelihood":
        for name, value in teaching.items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise InvalidInput(f"--by likelihood has no use for {option}; leave it out")
    if teaching["cap"] is not None and not teaching["cap"] > 0:
        raise InvalidInput(f"--cap must be above 0, got {teaching['cap']:g}")
    if not 0 < max_loss < float("inf"):
        raise InvalidInput(f"--max-loss must be above 0 and finite, got {max_loss:g}")


def _likelihood(model: str | None, max_loss: float) -> Finder:
    from stretto.data.graph_likelihood import LikelihoodGraphs
    from stretto.data.likelihood_scorer import ModelScorer

    return LikelihoodGraphs(ModelScorer.load(model), max_loss)


def _asker(
    out: Path, teaching: dict[str, Any], *, model: str | None, key_env: str, temperature: float,
    max_tokens: int, concurrency: int,
) -> Finder:  # fmt: skip
    from stretto.data.client import Endpoint
    from stretto.data.graph_teacher import TeacherGraphs
    from stretto.files import beside

    endpoint = Endpoint(
        model=model or "",
        url=teaching["base_url"],
        api_key_env=key_env,
        max_tokens=max_tokens,
        price_in=teaching["price_in"],
        price_out=teaching["price_out"],
        max_cost=teaching["cap"],
    )
    return TeacherGraphs(
        endpoint,
        beside(out, RAW),
        temperature=None if temperature < 0 else temperature,
        concurrency=concurrency,
    )


def _run(
    items: list[Item], opened: Callable[[], Finder], out: Path, *, identity: dict[str, Any],
    cut: str, steps: Path | None, quiet: bool,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Finds what is left; summary and exit status."""
    from stretto.cli.data_progress import Progress
    from stretto.cli.output import interruptible
    from stretto.data.graph_find import find_graphs
    from stretto.data.graph_steps import steps_of
    from stretto.data.graphs import Graph, keyed
    from stretto.data.rows import Reject, read_rows
    from stretto.data.settings import hold_to
    from stretto.data.store import Store
    from stretto.errors import INTERRUPTED, SOME_FAILED
    from stretto.files import beside

    steps_of("", cut)
    known = {} if steps is None else keyed(read_rows(steps, Graph))
    hold_to(beside(out, RUN), identity, str(out))
    rejects_path = beside(out, "rejects.jsonl")
    with Store(out, Graph) as kept, Store(rejects_path, Reject) as rejects:
        finder = opened()
        try:
            with Progress(quiet=quiet) as progress, interruptible() as is_interrupted:
                found = find_graphs(
                    items, finder, kept, rejects, cut=cut, known=known,
                    report=lambda done, todo: progress.update(f"{done} of {todo} responses"),
                    is_interrupted=is_interrupted,
                )  # fmt: skip
        finally:
            book: dict[str, Any] = getattr(finder, "ledger", dict)()
            getattr(finder, "close", lambda: None)()
    result = found.to_json() | ({"ledger": book} if book else {})
    if found.stopped == "interrupted":
        return result, INTERRUPTED
    return result, SOME_FAILED if found.left or found.rejected else 0
