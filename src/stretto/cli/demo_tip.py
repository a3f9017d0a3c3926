"""`stretto demo tip`: a problem is solved step by step, and steps no longer needed are let go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import demo_parts as parts
from stretto.cli.output import say

if TYPE_CHECKING:
    from stretto.cli.demo_board import Board
    from stretto.completion import Completion
    from stretto.problems import Problem

MODEL = "tiny-tip"

Model = Annotated[str, typer.Option(help="A model of dialect tip, taught such problems.")]
Task = Annotated[str, typer.Option(help="program, slots, tree, chain, dag, recall or countdown.")]
Size = Annotated[int, typer.Option(help="Steps before the answer.", metavar="N")]
Pace = Annotated[
    float, typer.Option(help="Tokens a second on a terminal; 0: as they come.", min=0, metavar="X")
]


def tip(
    *,
    model: Model = MODEL,
    task: Task = "program",
    size: Size = 20,
    index: parts.Index = 0,
    split: parts.Split = "test",
    seed: parts.Seed = 0,
    max_tokens: parts.MaxTokens = 1000,
    pace: Pace = 40.0,
    engine: parts.Engine = "auto",
    as_json: parts.AsJson = False,
    quiet: parts.Quiet = False,
) -> None:
    """Solve a problem live: steps appear, and are struck out when their register is taken over.

    A bar shows the tokens whose KV is live against those that dense decoding would hold.
    """
    from stretto.cli.demo_board import Board, LiveBoard
    from stretto.params import SamplingParams
    from stretto.problems import problem

    asked = problem(task, size, index, split=split, seed=seed)
    lm = parts.load(
        model, engine, own=MODEL, dialect="tip", lacks="steps to let go of", docs="docs/tiny.md"
    )
    stream = lm.submit(asked.prompt, SamplingParams(max_tokens=max_tokens))
    registers = {i: int(name.removeprefix("reg_")) for name, i in lm.card.control.items()}
    board = Board(stream.request.num_prompt_tokens, registers)
    parts.show(
        lm, stream, board, LiveBoard, prompt=asked.prompt,
        head=[f"{asked.task}, {asked.size} steps: {asked.prompt}"], pace=pace,
        summarise=lambda completion: _summarise(asked, completion),
        facts=lambda completion: _facts(asked, completion, board),
        as_json=as_json, quiet=quiet,
    )  # fmt: skip


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
