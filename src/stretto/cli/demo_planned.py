"""`stretto demo planned`: a model plans its answer, then masks turn into words in all parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import demo_parts as parts
from stretto.cli.output import say

if TYPE_CHECKING:
    from stretto.cli.demo_spans import SpanBoard
    from stretto.completion import Completion
    from stretto.eval.multipart import Problem

MODEL = "tiny-planned"
STEPS_RATIO = 0.5

Prompt = Annotated[
    str | None, typer.Argument(help="A question of yours instead of a problem.", show_default=False)
]
Model = Annotated[str, typer.Option(help="A model of dialect planned, taught such problems.")]
StepsRatio = Annotated[
    float | None,
    typer.Option(help="Passes a span takes, a token.", metavar="X", show_default="0.5"),
]
Threshold = Annotated[
    float | None,
    typer.Option(help="Write all that is at least so likely instead.", metavar="P"),
]
Pace = Annotated[
    float, typer.Option(help="Passes a second on a terminal; 0: as they come.", min=0, metavar="X")
]


def planned(
    prompt: Prompt = None,
    *,
    model: Model = MODEL,
    index: parts.Index = 0,
    split: parts.Split = "test",
    seed: parts.Seed = 0,
    max_tokens: parts.MaxTokens = 1000,
    steps_ratio: StepsRatio = None,
    threshold: Threshold = None,
    pace: Pace = 12.0,
    engine: parts.Engine = "auto",
    as_json: parts.AsJson = False,
    quiet: parts.Quiet = False,
) -> None:
    """Write an answer live: a plan first, then masks turn into words in all of its parts at once.

    Passes are counted against the steps that the same text takes one token after the other.
    """
    from stretto.cli.demo_spans import LiveSpans, SpanBoard
    from stretto.eval.multipart import SUMS, problems
    from stretto.params import SamplingParams

    if steps_ratio is None:
        steps_ratio = STEPS_RATIO if threshold is None else 1.0
    params = SamplingParams(max_tokens=max_tokens, steps_ratio=steps_ratio, threshold=threshold)
    problem = problems(seed, index + 1, split, kinds=SUMS)[index] if prompt is None else None
    text = problem.prompt if problem is not None else str(prompt)
    lm = parts.load(
        model, engine, own=MODEL, dialect="planned", lacks="spans that are written all at once",
        docs="docs/planned-training.md",
    )  # fmt: skip
    stream = lm.submit(text, params)
    board = SpanBoard(lm.vocabulary.decode, lm.card.control["pad"])
    parts.show(
        lm, stream, board, LiveSpans, prompt=text, head=text.splitlines(), pace=pace,
        summarise=lambda completion: _summarise(problem, completion, board),
        facts=lambda completion: _facts(text, problem, completion, board),
        as_json=as_json, quiet=quiet,
    )  # fmt: skip


def _is_right(problem: Problem, completion: Completion) -> bool:
    from stretto.eval.multipart import read_answer

    return read_answer(completion.text).total == problem.total


def _summarise(problem: Problem | None, completion: Completion, board: SpanBoard) -> None:
    if problem is not None:
        right = _is_right(problem, completion)
        say(f"answer: {'right' if right else f'wrong, the sum is {problem.total}'}")
    if completion.finish_reason != "stop":
        say(f"ended with {completion.finish_reason}")
    ratio = board.num_written / board.num_steps if board.num_steps else 0.0
    say(
        f"{board.num_steps} passes, {board.num_planned} of them for the plan; one token after the "
        f"other the text takes {board.num_written}, {ratio:.2f} times as many"
    )


def _facts(
    prompt: str, problem: Problem | None, completion: Completion, board: SpanBoard
) -> dict[str, Any]:
    usage = completion.usage
    return {
        "prompt": prompt,
        "text": completion.text,
        "answer": None if problem is None else problem.total,
        "is_right": None if problem is None else _is_right(problem, completion),
        "finish_reason": completion.finish_reason,
        "rounds": board.to_json(),
        "steps": board.num_steps,
        "plan_steps": board.num_planned,
        "steps_one_by_one": board.num_written,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        },
        "model": completion.model,
        "engine": completion.engine,
    }
