"""`stretto eval`: quality and speed of models over prompts, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import eval_parts as parts
from stretto.cli.eval_budget import eval_budget
from stretto.cli.eval_files import eval_examples, eval_export
from stretto.cli.eval_run import eval_run
from stretto.errors import SOME_FAILED

app = typer.Typer(no_args_is_help=True, help="Measure quality and speed over prompts.")
app.command("run")(eval_run)


@app.command("judge")
def eval_judge(
    folders: parts.Folders,
    *,
    judge: Annotated[
        str,
        typer.Option(
            metavar="KIND[:MODEL]", help="likelihood, llm, exact or reference; of two which model."
        ),
    ],
    prompts: parts.Prompts = None,
    judge_url: parts.JudgeUrl = None,
    api_key_env: parts.ApiKeyEnv = "OPENAI_API_KEY",
    expected: parts.Expected = None,
    references: parts.References = None,
    reference_field: parts.JudgeReferenceField = None,
    concurrency: parts.Concurrency = 8,
    price_in: parts.PriceIn = None,
    price_out: parts.PriceOut = None,
    max_cost: parts.MaxCost = None,
    as_json: parts.AsJson = False,
) -> None:
    """Let a judge compare finished runs' answers with the baseline's, and sum up anew.

    A judge that is a model is loaded once for all runs.
    """
    from stretto.cli.bench_parts import show
    from stretto.eval.folder import load_run
    from stretto.eval.summary import summary_of, text_of

    settings = parts.judge_settings(
        judge, url=judge_url, api_key_env=api_key_env, expected=expected, concurrency=concurrency,
        price_in=price_in, price_out=price_out, max_cost=max_cost,
        references=tuple(references) if references else None, reference_field=reference_field,
    )  # fmt: skip
    unjudged = parts.judge_runs(folders, settings, prompts or ())
    summaries = [summary_of(load_run(folder, settings.kind)) for folder in folders]
    if len(summaries) == 1:
        show(summaries[0] if as_json else None, text_of(summaries[0]))
    else:
        text = "\n\n".join(f"{s['run']}\n\n{text_of(s)}" for s in summaries)
        show({"runs": summaries} if as_json else None, text)
    parts.say_unjudged(unjudged)
    if unjudged:
        raise typer.Exit(SOME_FAILED)


@app.command("compare")
def eval_compare(
    folders: parts.Folders,
    *,
    judge: parts.WhoseVerdicts = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write compare.json and CSV files here.")
    ] = None,
    as_json: parts.AsJson = False,
) -> None:
    """Put runs side by side, with paired differences to the first one.

    Refused where they had other prompts, sampling, baselines, engines, warm-ups or judges.
    """
    from stretto.cli.bench_parts import prepare, show
    from stretto.eval.compare import compare, save, text_of

    result = compare(parts.load_runs(folders, judge), seed)
    if out is not None:
        prepare(out)
        save(out, result)
    show(result if as_json else None, text_of(result))


@app.command("plot")
def eval_plot(
    folders: parts.Folders,
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the pictures and CSV files go.")],
    quality: Annotated[
        str | None, typer.Option(help="accuracy, lc_win_rate or another; the first there is.")
    ] = None,
    judge: parts.WhoseVerdicts = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    as_json: parts.AsJson = False,
) -> None:
    """Plot quality against speed-ups, parallelism and live KV, a point a run."""
    from stretto.cli.bench_parts import prepare, show
    from stretto.eval.compare import compare
    from stretto.eval.plots import baseline_live, baseline_quality, choose_quality, save_plots

    runs = parts.load_runs(folders, judge)
    rows = compare(runs, seed)["runs"]
    name = choose_quality(rows, quality)
    prepare(out)
    written = save_plots(out, rows, name, baseline_quality(runs[0], name), baseline_live(runs[0]))
    show(written if as_json else None, "\n".join(str(out / file) for file in written))


app.command("budget")(eval_budget)
app.command("export")(eval_export)
app.command("examples")(eval_examples)
