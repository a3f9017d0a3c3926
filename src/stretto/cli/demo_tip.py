"""`stretto demo tip`: a problem is solved step by step, and steps no longer needed are let go."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.demo_parts import Lines, NoView, View, load, pause_between, play
from stretto.cli.output import interruptible, is_live, say, write_json, write_line
from stretto.errors import INTERRUPTED

if TYPE_CHECKING:
    from stretto.cli.demo_board import Board
    from stretto.completion import Completion
    from stretto.problems import Problem

MODEL = "tiny-tip"

Model = Annotated[str, typer.Option(help="A model of dialect tip, taught such problems.")]
Task = Annotated[str, typer.Option(help="program, tree, chain, dag or countdown.")]
Size = Annotated[int, typer.Option(help="Steps before the answer.", metavar="N")]
Index = Annotated[int, typer.Option(help="Which of these problems.", metavar="N")]
Split = Annotated[str, typer.Option(help="Of the problems: train, valid or test.")]
Seed = Annotated[int, typer.Option(help="Of the problems.", metavar="N")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to write at most.", metavar="N", min=1)]
Pace = Annotated[
    float, typer.Option(help="Tokens a second on a terminal; 0: as they come.", min=0, metavar="X")
]
Engine = Annotated[str, typer.Option(help="auto, hf, packed, fused or flex.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No live view, no summary.")]


def tip(
    *,
    model: Model = MODEL,
    task: Task = "program",
    size: Size = 20,
    index: Index = 0,
    split: Split = "test",
    seed: Seed = 0,
    max_tokens: MaxTokens = 1000,
    pace: Pace = 40.0,
    engine: Engine = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Solve a problem live: steps appear, and are struck out when their register is taken over.

    A bar shows the tokens whose KV is live against those that dense decoding would hold.
    """
    from stretto.cli.demo_board import Board
    from stretto.params import SamplingParams
    from stretto.problems import problem

    asked = problem(task, size, index, split=split, seed=seed)
    lm = load(
        model, engine, own=MODEL, dialect="tip", lacks="steps to let go of", docs="docs/tiny.md"
    )
    stream = lm.submit(asked.prompt, SamplingParams(max_tokens=max_tokens))
    registers = {i: int(name.removeprefix("reg_")) for name, i in lm.card.control.items()}
    board = Board(stream.request.num_prompt_tokens, registers)
    show = _view(asked, board, pace, as_json=as_json, quiet=quiet)
    with interruptible() as pressed:
        finished = play(lm, stream, board, show, pressed)
    if not as_json and not quiet:
        _summarise(asked, stream.completion)
    if as_json:
        write_json(_facts(asked, stream.completion, board))
    if not finished:
        raise typer.Exit(INTERRUPTED)


def _view(problem: Problem, board: Board, pace: float, *, as_json: bool, quiet: bool) -> View:
    """Live on a terminal, else lines, or nothing."""
    if as_json or quiet:
        return NoView()
    if not is_live(sys.stdout):
        write_line(f"{problem.task}, {problem.size} steps: {problem.prompt}")
        return Lines(board.whole_lines)
    from rich.console import Console

    from stretto.cli.demo_board import LiveBoard

    console = Console(file=sys.stdout, highlight=False)
    pause_s = pause_between(pace)
    return LiveBoard(console, board, problem.prompt, wait=lambda: time.sleep(pause_s))


def _summarise(problem: Problem, completion: Completion) -> None:
    kv = completion.live_kv
    right = problem.check(completion.text)
    verdict = "right" if right else f"wrong, it is {problem.answer}"
    if completion.finish_reason != "stop":
        verdict += f", ended with {completion.finish_reason}"
    saved = 1 - kv.mean / kv.dense_mean if kv.dense_mean else 0.0
    say(f"answer: {verdict}")
    say(
        f"live KV: {kv.mean:.0f} tokens on average, {kv.peak} at most; dense decoding holds "
        f"{kv.dense_mean:.0f} on average ({saved:.0%} less)"
    )


def _facts(problem: Problem, completion: Completion, board: Board) -> dict[str, Any]:
    kv = completion.live_kv
    held = ("mean", "peak", "dense_mean", "pool_mean_slots", "pool_peak_slots")
    return {
        "problem": problem.id,
        "prompt": problem.prompt,
        "text": completion.text,
        "answer": problem.answer,
        "is_right": problem.check(completion.text),
        "finish_reason": completion.finish_reason,
        "steps": board.to_json(),
        "usage": {
            "prompt_tokens": completion.usage.prompt_tokens,
            "completion_tokens": completion.usage.completion_tokens,
        },
        "live_kv": {name: getattr(kv, name) for name in held},
        "model": completion.model,
        "engine": completion.engine,
    }
