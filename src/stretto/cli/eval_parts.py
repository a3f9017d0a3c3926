"""What the verbs of `stretto eval` share: options, the judge, and runs by their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from stretto.eval.folder import Run
    from stretto.eval.judges import Judge, JudgeSettings

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")]
Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Runs' folders.")]
Prompts = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="JSONL with the prompts; repeatable.")
]
JudgeName = Annotated[
    str | None,
    typer.Option(metavar="KIND[:MODEL]", help="likelihood, llm or exact, and which model."),
]
JudgeUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Of judge llm: the endpoint, up to its /v1.")
]
ApiKeyEnv = Annotated[
    str, typer.Option(metavar="NAME", help="The environment variable with the endpoint's key.")
]
Expected = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Of judge exact: JSONL with right answers.")
]
MaxCost = Annotated[
    float | None, typer.Option(metavar="X", help="Dollars that judge llm may spend.")
]
PriceIn = Annotated[
    float | None, typer.Option(metavar="X", help="Dollars a million tokens read by judge llm.")
]
PriceOut = Annotated[
    float | None, typer.Option(metavar="X", help="Dollars a million tokens written by judge llm.")
]
Concurrency = Annotated[int, typer.Option(metavar="N", help="Requests of judge llm at once.")]
WhoseVerdicts = Annotated[
    str | None,
    typer.Option("--judge", metavar="KIND", help="Whose verdicts, where a run has several."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load_runs(paths: Sequence[Path], judge: str | None) -> list[Run]:
    """Runs with their verdicts. Raises if a judge reports on a model that it has scored the answers
    for, wherever the verdicts came from."""
    from stretto.eval.folder import load_run
    from stretto.eval.judging import check_reporter

    runs = [load_run(path, judge) for path in paths]
    for run in runs:
        if run.verdicts is not None:
            check_reporter(run.config, run.verdicts.judge)
    return runs


def judge_settings(judge: str, **settings: Any) -> JudgeSettings:
    """Of `KIND[:MODEL]` and other settings."""
    from stretto.errors import UnknownName
    from stretto.eval.judges import JUDGES, JudgeSettings

    kind, _, model = judge.partition(":")
    if kind not in JUDGES:
        raise UnknownName("judge", kind, list(JUDGES))
    return JudgeSettings(kind=kind, model=model or None, **settings)


def check_judge(settings: JudgeSettings, configs: Sequence[Mapping[str, Any]]) -> None:
    """Opens a judge and closes it again, before hours are spent on answers: raises if it cannot be
    had, or scored what a side of a run with one of these settings was trained on."""
    from stretto.eval.judges import open_judge
    from stretto.eval.judging import check_reporter

    if settings.kind == "exact":
        return
    judge = open_judge(settings)
    try:
        for config in configs:
            check_reporter(config, judge.identity)
    finally:
        judge.close()


def judge_run(path: Path, settings: JudgeSettings, prompts: Sequence[Path]) -> int:
    """Judges a run, writes the verdicts and the new summary; returns how many prompts have no
    verdict. `prompts`: files with the prompts, of a run that kept none."""
    from stretto.cli.output import say
    from stretto.eval import judging
    from stretto.eval.folder import load_run, unjudged_run
    from stretto.eval.summary import save_summary
    from stretto.eval.texts import texts_of

    run = unjudged_run(path)
    texts = texts_of(run, prompts)
    opened = _open(run, settings, prompts)
    try:
        say(f"judging {len(run.rows)} prompts by {opened.identity.partition(';')[0]}")
        verdicts = judging.judge_run(run, opened, texts)
    finally:
        opened.close()
    save_summary(load_run(path, settings.kind))
    return judging.num_unjudged(verdicts)


def _open(run: Run, settings: JudgeSettings, prompts: Sequence[Path]) -> Judge:
    from dataclasses import replace

    from stretto.eval.judges import open_judge
    from stretto.eval.judging import task_judge

    if settings.kind == "exact" and settings.expected is None:
        return task_judge(run, prompts)
    replies = run.path / "replies.jsonl" if settings.kind == "llm" else None
    return open_judge(replace(settings, replies=replies))
