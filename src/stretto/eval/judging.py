"""Verdicts on a finished run: a judge compares each of our answers with the baseline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import InvalidInput, StrettoError
from stretto.eval.folder import Run, write_verdicts
from stretto.eval.judges.base import Comparison, check_different
from stretto.eval.rows import EvalRow, VerdictRow

if TYPE_CHECKING:
    from stretto.eval.judges.base import Judge, Verdict


def check_judge(run: Run, identity: str) -> None:
    """Raises `InvalidInput` if this judge scored answers that either model was trained on, or as
    `check_judgeable`."""
    check_judgeable(run)
    check_reporter(run.config, identity)


def check_judgeable(run: Run) -> None:
    """Raises `InvalidInput` if no judge can compare: there are several answers to a prompt, or no
    baseline, or none of its answers."""
    run.check_single("judged")
    if not run.has_baseline:
        raise InvalidInput(f"{run.path} has no baseline to judge against; run it with one")
    if all(row.ours is None or row.baseline is None for row in run.rows):
        raise InvalidInput(
            f"no prompt of {run.path} has an answer of both sides, so there is nothing to judge; "
            "its rows say why"
        )


def check_reporter(config: Mapping[str, Any], identity: str) -> None:
    """Raises `InvalidInput` if this judge scored answers that a side of a run with this `config`
    was trained on."""
    sides = [config[side] for side in ("ours", "baseline") if config[side] is not None]
    check_different([judge for side in sides for judge in side["scored_by"]], identity)


def judge_run(run: Run, judge: Judge, texts: Mapping[str, str]) -> list[VerdictRow]:
    """A verdict on every prompt that both sides answered, written into the run's folder at once.

    `texts`: the prompts' by id. Two answers that are the same, byte for byte, are a tie that no
    judge is asked about. A prompt the judge gave no verdict on is kept without a preference. Raises
    as `check_judge`, and `StrettoError` if the judge gave no verdict at all.
    """
    check_judge(run, judge.identity)
    rows = [row for row in run.rows if row.ours is not None and row.baseline is not None]
    pairs = {row.prompt_id: _pair(row) for row in rows}
    asked = [name for name, (ours, baseline) in pairs.items() if ours != baseline]
    comparisons = [Comparison(texts[name], *pairs[name]) for name in asked]
    said = dict(zip(asked, judge.compare(comparisons) if comparisons else [], strict=True))
    if asked and not any(verdict is not None for verdict in said.values()):
        raise StrettoError(f"judge {judge.identity} gave no verdict on any of {len(asked)} prompts")
    verdicts = [_row(name, judge.identity, name in said, said.get(name)) for name in pairs]
    write_verdicts(run.path, judge.identity.partition(":")[0], verdicts)
    return verdicts


def task_judge(run: Run, paths: Sequence[Path]) -> Judge:
    """Judge `exact` by the run's own task, whose items are read from `paths` or made anew. Raises
    `InvalidInput` for a task without scores."""
    from stretto.data.rows import prompt_id
    from stretto.eval.judges.exact import ExactJudge
    from stretto.eval.tasks import get_task
    from stretto.eval.texts import items_of

    task = get_task(run.config["task"]["name"])
    score = task.score
    if score is None:
        raise InvalidInput(
            f"task {task.name} cannot tell right from wrong; name right answers with --expected, "
            "or another judge"
        )
    items = items_of(run, paths)
    return ExactJudge(
        lambda prompt, answer: score(items[prompt_id(prompt)], answer).value,
        f"{task.name}-{task.version}",
    )


def unjudged(verdicts: Sequence[VerdictRow]) -> list[str]:
    """The prompts without a verdict."""
    return [verdict.prompt_id for verdict in verdicts if verdict.preference is None]


def _pair(row: EvalRow) -> tuple[str, str]:
    if row.ours is None or row.baseline is None:
        raise AssertionError("only rows that both sides answered are judged")
    return row.ours.text, row.baseline.text


def _row(name: str, judge: str, is_asked: bool, verdict: Verdict | None) -> VerdictRow:
    if not is_asked:
        details = {"same": True}
        return VerdictRow(prompt_id=name, preference=0.5, judge=judge, details=details)
    if verdict is None:
        return VerdictRow(prompt_id=name, judge=judge)
    preference = (verdict.preference + 1) / 2
    return VerdictRow(prompt_id=name, preference=preference, judge=judge, details=verdict.details)
