"""What the verbs of `stretto eval` share: options, the judge, and runs by their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.errors import InvalidInput

if TYPE_CHECKING:
    from stretto.eval.folder import Run
    from stretto.eval.judges import Judge, JudgeSettings

NUM_NAMED = 8

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")]
Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Runs' folders.")]
Prompts = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="JSONL with the prompts; repeatable.")
]
JudgeName = Annotated[
    str | None,
    typer.Option(
        metavar="KIND[:MODEL]", help="likelihood, llm, exact or reference; of two which model."
    ),
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
References = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Of judge reference: JSONL with answers; repeatable."),
]
JudgeReferenceField = Annotated[
    str | None,
    typer.Option("--reference-field", metavar="NAME", help="Field of a reference; else a usual."),
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


def judge_runs(
    paths: Sequence[Path], settings: JudgeSettings, prompts: Sequence[Path]
) -> list[str]:
    """Judges runs by one judge, writes the verdicts and new summary of each when it is done;
    returns the prompts that have no verdict, of each run. All runs are read before anything is
    loaded. `prompts`: files with the prompts, of runs that kept none."""
    from stretto.cli.output import say
    from stretto.eval import judging
    from stretto.eval.folder import load_run, unjudged_run
    from stretto.eval.summary import save_summary
    from stretto.eval.texts import texts_of

    if len({path.resolve() for path in paths}) < len(paths):
        raise InvalidInput("one run is named twice; name each once")
    runs = [unjudged_run(path) for path in paths]
    texts = [texts_of(run, prompts) for run in runs]
    for run in runs:
        judging.check_judgeable(run)
    unjudged: list[str] = []
    with JudgeDesk(settings, prompts) as desk:
        for run, own in zip(runs, texts, strict=True):
            judge = desk.judge_of(run)
            name = judge.identity.partition(";")[0]
            say(f"judging {len(run.rows)} prompts of {run.name} by {name}")
            unjudged += judging.unjudged(judging.judge_run(run, judge, own))
            save_summary(load_run(run.path, settings.kind))
    return unjudged


def say_unjudged(prompts: Sequence[str]) -> None:
    """Counts verdicts that a judge did not give, and names the prompts."""
    from stretto.cli.output import say

    if prompts:
        say(f"{len(prompts)} prompts have no verdict: {some_of(prompts)}")


def some_of(names: Sequence[str]) -> str:
    """The first few, each once, and whether there are more."""
    once = list(dict.fromkeys(names))
    return ", ".join(once[:NUM_NAMED]) + (", …" if len(once) > NUM_NAMED else "")


class JudgeDesk:
    """Opens judges for runs: one for all of them, unless each run has one of its own, as has a
    task's check, and an endpoint, whose replies are kept in the run's folder. What an endpoint may
    spend is for all runs together."""

    def __init__(self, settings: JudgeSettings, prompts: Sequence[Path]) -> None:
        self._settings = settings
        self._prompts = prompts
        self._judge: Judge | None = None

    def judge_of(self, run: Run) -> Judge:
        from stretto.eval.judges import open_judge
        from stretto.eval.judging import task_judge

        settings = self._settings
        if settings.kind == "exact" and settings.expected is None:
            self._replace(task_judge(run, self._prompts))
        elif settings.kind == "llm":
            cost = self._spent()
            self._replace(open_judge(replace(settings, replies=run.path / "replies.jsonl")))
            self._charge(cost)
        elif self._judge is None:
            self._judge = open_judge(settings)
        if self._judge is None:
            raise AssertionError("a judge was opened")
        return self._judge

    def _spent(self) -> float:
        """What the judge has spent, with those before it."""
        client = getattr(self._judge, "client", None)
        return 0.0 if client is None else float(client.ledger.cost)

    def _charge(self, cost: float) -> None:
        client = getattr(self._judge, "client", None)
        if client is not None:
            client.ledger.cost += cost

    def _replace(self, judge: Judge) -> None:
        self.close()
        self._judge = judge

    def close(self) -> None:
        if self._judge is not None:
            self._judge.close()
        self._judge = None

    def __enter__(self) -> JudgeDesk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
