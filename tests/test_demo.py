"""`stretto demo`: the board of steps against the trace, and what is shown of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.cli.demo_board import Board, LiveBoard
from stretto.cli.demo_parts import Lines, pause_between, play
from stretto.models.tiny import new_tiny
from stretto.problems import ALPHABET
from stretto.runtime.events import Token

TEXT = "<reg_0>a=1:1<reg_1>b=a+1:2<reg_0>c=b+1:3<reg_0>?c:3"
STEPS = ["a=1:1", "b=a+1:2", "c=b+1:3", "?c:3"]


@pytest.fixture(scope="module", params=[False, True], ids=["strict", "grace"])
def lm(request: Any, tmp_path_factory: Any) -> LM:
    folder = tmp_path_factory.mktemp("models") / "m"
    settings = {"num_registers": 2, "grace": request.param}
    new_tiny(folder, "tiny-1m", list(ALPHABET), dialect="tip", settings=settings)
    return LM.load(folder, pool_slots=256, engine="hf")


def scripted(lm: LM) -> tuple[Any, Board]:
    """A stream that writes `TEXT`, and its board."""
    vocabulary = lm.vocabulary
    ids: list[int] = []
    for part in TEXT.replace("<", "|<").replace(">", ">|").split("|"):
        name = part.strip("<>")
        ids += [vocabulary.control[name]] if name.startswith("reg_") else vocabulary.encode(part)
    ids.append(min(vocabulary.end_ids))
    stream = lm.submit("a?", SamplingParams(), script=lambda _, index: ids[index])
    registers = {i: int(name[4:]) for name, i in vocabulary.control.items()}
    return stream, Board(stream.request.num_prompt_tokens, registers)


def test_the_board_is_the_trace(lm: LM) -> None:
    stream, board = scripted(lm)
    assert play(lm, stream, board, Lines(board.whole_lines), lambda: False)
    assert [step["text"] for step in board.to_json()] == STEPS
    assert [step["register"] for step in board.to_json()] == [0, 1, 0, 0]
    assert [step["gone_at"] for step in board.to_json()] == [2, None, 3, None]
    assert board.num_dense == 3 + len("".join(STEPS)) + len(STEPS)
    assert board.num_live == 3 + len(STEPS[1]) + len(STEPS[3]) + 2


def test_all_events_at_once_give_the_same_board(lm: LM) -> None:
    stream, board = scripted(lm)
    events = list(stream)
    whole = Board(stream.request.num_prompt_tokens, board._registers)
    assert whole.take(events)
    for event in events:
        board.take([event])
    assert board.to_json() == whole.to_json()
    assert [step.gone_at for step in whole.steps] == [2, None, 3, None]
    assert sum(isinstance(event, Token) for event in events) == sum(
        step.num_tokens for step in whole.steps
    )


def test_live_tokens_are_those_of_the_completion(lm: LM) -> None:
    """At its peak the board holds what the trace says that a token saw."""
    stream, board = scripted(lm)
    live = []
    for event in stream:
        if board.take([event]) and isinstance(event, Token):
            live.append(board.num_live)
    assert max(live) == stream.completion.live_kv.peak


def test_lines_come_when_a_step_is_whole(lm: LM, capfd: Any) -> None:
    stream, board = scripted(lm)
    play(lm, stream, board, Lines(board.whole_lines), lambda: False)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        "step 1  r0 a=1:1  live 9 of 9 tokens",
        "step 2  r1 b=a+1:2  live 17 of 17 tokens",
        "step 3  r0 c=b+1:3  live 19 of 25 tokens, lets go of step 1",
        "step 4  r0 ?c:3  live 16 of 30 tokens, lets go of step 3",
    ]


@pytest.mark.parametrize("width", [12, 40, 100])
def test_the_live_board_strikes_out_what_is_gone(lm: LM, width: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = io.StringIO()
    console = Console(
        file=screen, force_terminal=True, width=width, height=24, highlight=False,
        color_system="standard",
    )  # fmt: skip
    stream, board = scripted(lm)
    waits: list[int] = []
    view = LiveBoard(console, board, "a?", wait=lambda: waits.append(board.num_dense))
    play(lm, stream, board, view, lambda: False)
    assert waits == list(range(4, board.num_dense + 1))
    with console.capture() as capture:
        console.print(view.render())
    shown = capture.get()
    struck = [line for line in shown.splitlines() if "\x1b[2;9" in line]
    assert "".join(struck).count("a=1:1") == 1
    lines = Console(file=io.StringIO(), width=width, height=24)
    with lines.capture() as capture:
        lines.print(view.render())
    plain = capture.get()
    bar = next(line for line in plain.splitlines() if "█" in line)
    assert len(bar) <= width
    assert bar.count("█") == round((width - 2) * board.num_live / 32)
    assert all(len(line.rstrip()) <= width for line in plain.splitlines())


def test_ctrl_c_keeps_what_there_is(lm: LM) -> None:
    stream, board = scripted(lm)
    presses = iter([False] * 10 + [True] * 5)
    assert not play(lm, stream, board, Lines(board.whole_lines), lambda: next(presses))
    assert stream.request.finish_reason == "cancelled"
    assert 0 < len(board.steps) < 4
    lm.scheduler.check_integrity()
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


def test_the_verb(tmp_path: Path, capfd: Any) -> None:
    new_tiny(tmp_path / "m", "tiny-1m", list(ALPHABET), dialect="tip")
    command = ["demo", "tip", "--model", str(tmp_path / "m"), "--size", "12", "--max-tokens", "20"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["problem"] == "program-12-test-0-0"
    num_tokens = sum(step["num_tokens"] for step in found["steps"])
    assert num_tokens == 20 or (found["finish_reason"] == "stop" and num_tokens < 20)
    registers = sum(step["register"] is not None for step in found["steps"])
    assert 0 < found["usage"]["completion_tokens"] <= num_tokens - registers
    assert not found["is_right"]
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"program, 12 steps: {found['prompt']}\nstep 1 ")
    assert err.startswith("answer: wrong, it is ")
    assert "dense decoding holds" in err


def test_what_the_verb_refuses(tmp_path: Path, capfd: Any) -> None:
    new_tiny(tmp_path / "m", "tiny-1m", ["a"])
    assert main(["demo", "tip", "--model", str(tmp_path / "m")]) == 2
    assert "no steps to let go of" in capfd.readouterr().err
    assert main(["demo", "tip", "--task", "tre"]) == 2
    assert "did you mean 'tree'?" in capfd.readouterr().err


def test_a_model_that_is_not_shipped(capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("stretto.models.shipped.shipped", dict)
    assert main(["demo", "tip"]) == 2
    assert "give its folder with --model" in capfd.readouterr().err


def test_a_pace_is_a_pause_that_ends() -> None:
    paces = (0.0, 40.0, 1.0, 1e-9, 5e-324, float("inf"))
    assert [pause_between(pace) for pace in paces] == [0.0, 0.025, 1.0, 10.0, 10.0, 0.0]
