"""`stretto train score` and `stretto train pairs`: from sampled answers to best and worst ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_options, eval_parts, options, train_judge
from stretto.cli.output import say, write_rows
from stretto.cli.train_sampler import control_of
from stretto.errors import INTERRUPTED, SOME_FAILED
from stretto.files import beside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stretto.data.rows import Answer, PromptBook
    from stretto.eval.judges import Judge, JudgeSettings
    from stretto.train.pairs import Pair
    from stretto.train.scoring import Opponent, Scoring

Answers = Annotated[
    list[Path], typer.Option(metavar="FILE", help="Answers of data sample; repeatable.")
]
Baseline = Annotated[Path, typer.Option(metavar="FILE", help="Answers of the sequential baseline.")]
Lambda = Annotated[str, typer.Option("--lambda", metavar="X", help="Weight of quality: 0 to inf.")]
Variant = Annotated[
    str, typer.Option(metavar="NAME", help="speedup, parallelism, harmonic, arithmetic or matched.")
]
LengthRatio = Annotated[
    float | None, typer.Option(metavar="X", help="Pair only texts of like length, to this factor.")
]


def score(
    *,
    answers: Answers,
    baseline: Baseline,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Scored answers, JSONL.")],
    prompts: eval_parts.Prompts = None,
    prompt_field: data_options.PromptField = None,
    references: train_judge.References = None,
    reference_field: eval_parts.JudgeReferenceField = None,
    model: Annotated[
        str | None, typer.Option(help="The model that sampled, if not as noted beside the answers.")
    ] = None,
    judge: train_judge.JudgeName = "likelihood",
    judge_url: eval_parts.JudgeUrl = None,
    api_key_env: eval_parts.ApiKeyEnv = "OPENAI_API_KEY",
    expected: eval_parts.Expected = None,
    price_in: eval_parts.PriceIn = None,
    price_out: eval_parts.PriceOut = None,
    max_cost: eval_parts.MaxCost = None,
    concurrency: eval_parts.Concurrency = 8,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    as_json: data_options.AsJson = False,
    quiet: data_options.Quiet = False,
) -> None:
    """Score sampled answers: speed against a baseline, quality by a judge.

    The same command goes on where it ended. Exits with 3 if answers are left without a score.
    """
    from stretto.data.rows import PromptBook

    data_options.check(concurrency=concurrency, threads=threads)
    settings, held_against = train_judge.judge_settings(
        judge,
        references,
        reference_field,
        url=judge_url,
        api_key_env=api_key_env,
        expected=expected,
        replies=beside(out, "replies.jsonl"),
        concurrency=concurrency,
        price_in=price_in,
        price_out=price_out,
        max_cost=max_cost,
        dtype=dtype,
        device=device,
    )
    book = PromptBook.read(prompts or [], prompt_field=prompt_field)
    rows = read_answers(answers)
    control = control_of(rows, answers, model)
    inputs = Inputs.of(rows, baseline, book, references=held_against.read(), control=control)
    set_threads(threads)
    scoring, stopped = run_scoring(inputs, settings, out, quiet=quiet)
    data_options.show(scoring.to_json() | {"file": str(out)}, as_json)
    train_judge.say_unrated(scoring)
    left = scoring.unjudged or scoring.no_baseline or scoring.unrated
    raise typer.Exit(stopped or (SOME_FAILED if left else 0))


def pairs(
    *,
    scored: Annotated[Path, typer.Option(metavar="FILE", help="Answers that train score scored.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Pairs, JSONL.")],
    lam: Lambda = "4",
    variant: Variant = "speedup",
    length_ratio: LengthRatio = None,
    as_json: data_options.AsJson = False,
) -> None:
    """Pair the best and the worst answer to each prompt by speed + lambda * quality."""
    from stretto.data.rows import read_rows
    from stretto.train.pairs import Scored, summarise

    rows = read_rows(scored, Scored)
    made = write_pairs(rows, out, lam=lam, variant=variant, length_ratio=length_ratio)
    result = summarise(made, rows)
    data_options.show(result | {"file": str(out)}, as_json)
    say_skipped(result["skipped"], len(rows), len(made))


# -- shared with `train prefer` --------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What is scored, against what, with which control tokens."""

    answers: list[Answer]
    opponents: dict[str, Opponent]
    prompt_of: Callable[[Answer], str]
    control: dict[str, int]

    @classmethod
    def of(
        cls,
        answers: list[Answer],
        baseline: Path,
        book: PromptBook,
        *,
        references: Mapping[str, str],
        control: dict[str, int],
    ) -> Inputs:
        from stretto.data.rows import Answer, read_rows
        from stretto.train.scoring import opponents_of

        opponents = opponents_of(read_rows(baseline, Answer), references)
        return cls(answers, opponents, book.prompt_of, control)


def read_answers(paths: Sequence[Path]) -> list[Answer]:
    """Answers of all files. Raises `InvalidInput` for one that comes twice."""
    from stretto.data.rows import Answer, read_rows
    from stretto.errors import InvalidInput

    rows: dict[str, Answer] = {}
    for path in paths:
        for row in read_rows(path, Answer):
            if row.key in rows:
                raise InvalidInput(f"{path} has answer {row.key} again; give each file once")
            rows[row.key] = row
    return list(rows.values())


def set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def run_scoring(
    inputs: Inputs, settings: JudgeSettings | None, out: Path, *, quiet: bool
) -> tuple[Scoring, int]:
    """Judges what is left, writes all scored rows, and returns them with an exit status: 0, 3 if
    the judge could do no more, 130 if interrupted. What was measured is on disk in any case."""
    from stretto.data.store import Store
    from stretto.train.scoring import Judged

    if settings is None:
        found, code = _score(inputs, None, None, quiet)
    else:
        from stretto.eval.judges import open_judge

        judged_path = beside(out, "judged.jsonl")
        with Store(judged_path, Judged) as judged:
            judge = open_judge(settings)
            try:
                found, code = _score(inputs, judge, judged, quiet)
            finally:
                judge.close()
    write_rows(out, found.rows)
    return found, code


def _score(inputs: Inputs, judge: Judge | None, judged: Any, quiet: bool) -> tuple[Scoring, int]:
    """Scores all, or what was judged before the judge or the user stopped."""
    from stretto.cli.data_progress import Progress
    from stretto.cli.output import interruptible
    from stretto.data.annotators import Exhausted
    from stretto.train.scoring import score_answers

    options: dict[str, Any] = {"prompt_of": inputs.prompt_of, "control": inputs.control}
    with Progress(quiet=quiet) as progress, interruptible() as is_interrupted:

        def report(done: int, total: int) -> None:
            progress.update(f"{done}/{total} answers judged")
            if is_interrupted():
                raise _Stopped

        everything = (inputs.answers, inputs.opponents, judge, judged)
        try:
            return score_answers(*everything, **options, report=report), 0
        except Exhausted as error:
            progress.note(f"stretto: {error}")
            code = SOME_FAILED
        except _Stopped:
            code = INTERRUPTED
    return _judged_so_far(inputs, judge, judged), code


class _Stopped(Exception):
    """Ctrl-C: what is measured is on disk."""


def _judged_so_far(inputs: Inputs, judge: Judge | None, judged: Any) -> Scoring:
    from stretto.train.scoring import score_answers

    ready = [a for a in inputs.answers if a.key in judged]
    left = [a.key for a in inputs.answers if a.key not in judged]
    found = score_answers(
        ready, inputs.opponents, judge, judged, prompt_of=inputs.prompt_of, control=inputs.control
    )
    found.unjudged = left
    return found


WHY_SKIPPED = {
    "one-candidate": "fewer than two answers have a score",
    "tie": "all scores are the same",
    "no-sound-best": "every answer has a flaw",
    "best-is-worst": "no answer without a flaw scores above the worst one",
    "lengths-differ": "no two answers of like length differ in score",
}
FEW_ANSWERS = 4
"""To a prompt: below that a quality, which is told in their spread, says little."""


def say_skipped(skipped: Mapping[str, int], num_rows: int, num_prompts: int) -> None:
    """Why prompts have no pair, and whether there is much to choose from."""
    for reason, count in skipped.items():
        say(f"{count} prompts have no pair, {reason}: {WHY_SKIPPED[reason]}")
    if num_rows < FEW_ANSWERS * num_prompts:
        say(
            f"{num_rows / num_prompts:.1f} answers a prompt are few to choose the best and the "
            "worst of; sample more (data sample --n)"
        )


def write_pairs(
    rows: Sequence[Any], out: Path, *, lam: str, variant: str, length_ratio: float | None
) -> list[Pair]:
    from stretto.errors import InvalidInput, UnknownName
    from stretto.train.pairs import make_pairs
    from stretto.train.scores import VARIANTS, parse_lambda

    if variant not in VARIANTS:
        raise UnknownName("variant", variant, list(VARIANTS))
    weight = parse_lambda(lam)
    if weight and all(row.judge is None for row in rows):
        raise InvalidInput(
            f"lambda {lam} needs a quality, and no judge was asked; score the answers with one, or "
            "--lambda 0"
        )
    made = make_pairs(rows, lam=weight, variant=variant, length_ratio=length_ratio)
    write_rows(out, made)
    return made
