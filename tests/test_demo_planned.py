"""`stretto demo planned`: the board of spans against the trace, and what is shown of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from planned_kit import planned_lm
from rich.console import Console
from serving import scripted

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.cli.demo_parts import Lines, play
from stretto.cli.demo_spans import LiveSpans, SpanBoard
from stretto.cli.live import MASKED
from stretto.cli.output import escaped
from stretto.eval.multipart import SUMS, problems
from stretto.models.tiny import new_tiny
from stretto.runtime.request import Script

PLAN = [[("one", 2), ("two", 4)], [("three", 3)]]
PASSES = [[1, 2], [2]]
"""Of half a pass a token."""
PARAMS = SamplingParams(temperature=1.0, steps_ratio=0.5, seed=1)


@pytest.fixture(scope="module")
def lm() -> LM:
    return planned_lm(unit=1)


def plan_of(lm: LM) -> Script:
    """Main promises `PLAN`; the spans are drawn."""
    control, ids = lm.card.control, list[int]()
    for number, promises in enumerate(PLAN):
        ids += [control["sync"]] if number else []
        for topic, length in promises:
            named = [*lm.vocabulary.encode(topic), control["tokens"]]
            ids += [control["promise"], *named, *lm.vocabulary.encode(str(length))]
            ids.append(control["promise_end"])
    ids.append(min(lm.vocabulary.end_ids))
    return lambda thread, index: ids[index] if thread == "main" else None


def begun(lm: LM) -> tuple[Any, SpanBoard]:
    """A stream that plans `PLAN`, and its board."""
    stream = lm.submit("Tell.", PARAMS, script=plan_of(lm))
    return stream, SpanBoard(lm.vocabulary.decode, lm.card.control["pad"])


class Seen:
    """Keeps how many places of each span were written at each update."""

    def __init__(self, board: SpanBoard) -> None:
        self.board = board
        self.written: list[tuple[int, ...]] = []
        self.has_finished = False

    def update(self) -> None:
        counts = (sum(p is not None for p in span.places) for span in self.board.spans)
        self.written.append(tuple(counts))

    def finish(self) -> None:
        self.has_finished = True


def test_the_board_is_the_trace(lm: LM) -> None:
    stream, board = begun(lm)
    seen = Seen(board)
    assert play(lm, stream, board, seen, lambda: False)
    found, told = stream.completion, board.to_json()
    assert seen.has_finished
    assert [[(s["topic"], s["length"]) for s in r["spans"]] for r in told] == PLAN
    assert [[s["passes"] for s in r["spans"]] for r in told] == PASSES
    assert "".join(s["text"] for r in told for s in r["spans"]) == found.text
    assert "".join(r["plan"] for r in told) == (
        '<promise topic="one" tokens="2"/><promise topic="two" tokens="4"/><sync/>'
        '<promise topic="three" tokens="3"/>'
    )
    spans = [s for s in found.trace.segments if s.kind == "block"]
    drawn = [t for s in spans for t in s.tokens[1:-1]]
    assert board.num_written == len(drawn) - drawn.count(lm.card.control["pad"])
    assert board.num_steps == found.usage.sequential_steps
    assert board.num_planned + 2 + 2 == board.num_steps  # the slower span of each round
    assert [(s.first_step, s.last_step) for s in board.spans] == [
        (thread.start_step, thread.end_step) for thread in found.threads[1:]
    ]


def test_all_spans_of_a_plan_are_written_at_once(lm: LM) -> None:
    stream, board = begun(lm)
    seen = Seen(board)
    play(lm, stream, board, seen, lambda: False)
    moments = list(dict.fromkeys(seen.written))
    assert moments == [(), (0, 0), (2, 2), (2, 4), (2, 4, 0), (2, 4, 1), (2, 4, 3)]


def test_all_events_at_once_give_the_same_board(lm: LM) -> None:
    stream, board = begun(lm)
    play(lm, stream, board, Seen(board), lambda: False)
    whole = SpanBoard(lm.vocabulary.decode, lm.card.control["pad"])
    assert whole.take(stream.request.log.events)
    assert whole.to_json() == board.to_json()
    assert not whole.take([])


def test_a_line_comes_when_it_is_whole(lm: LM, capfd: Any) -> None:
    stream, board = begun(lm)
    lines = Lines(board.whole_lines)
    told: list[int] = []

    class Counting:
        def update(self) -> None:
            lines.update()
            told.append(len(board.whole_lines(False)))

        def finish(self) -> None:
            lines.finish()

    play(lm, stream, board, Counting(), lambda: False)
    found = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in found] == [
        'plan  <promise topic="one" tokens="2"/><promise topic="two" tokens="4"/>',
        "span 1  one (2 places, 1 passes)", "span 2  two (4 places, 2 passes)",
        'plan  <sync/><promise topic="three" tokens="3"/>', "span 3  three (3 places, 2 passes)",
    ]  # fmt: skip
    assert told == sorted(told)
    assert {0, 1} <= set(told)
    assert [line.split(": ", 1)[1] for line in found if line.startswith("span")] == [
        " ".join(escaped(span.text).split()) for span in board.spans
    ]


@pytest.mark.parametrize(("width", "height"), [(24, 8), (60, 24), (120, 40)])
def test_the_live_board_fits_and_counts(lm: LM, width: int, height: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, highlight=False
    )
    stream, board = begun(lm)
    shown: list[str] = []

    def look() -> None:
        plain = Console(file=io.StringIO(), width=width, height=height)
        plain.print(view.render())
        shown.append(plain.file.getvalue())  # type: ignore[attr-defined]

    view = LiveSpans(console, board, "Tell me of it.", wait=look)
    play(lm, stream, board, view, lambda: False)
    look()
    for screen in shown:
        lines = screen.splitlines()
        assert len(lines) <= height
        assert all(len(line.rstrip()) <= width for line in lines)
        assert " passes; one token after"[: width - 8] in lines[-1]
    masks = [screen.count(MASKED) for screen in shown]
    assert max(masks) == 6  # both spans of the first plan
    assert masks[-1] == 0
    assert shown[-1].splitlines()[-1].startswith(f"{board.num_steps} passes")
    assert "three: " in shown[-1]


def test_ctrl_c_keeps_what_there_is(lm: LM, capfd: Any) -> None:
    stream, board = begun(lm)
    presses = iter([False] * (board.num_planned + 14) + [True] * 5)
    assert not play(lm, stream, board, Lines(board.whole_lines), lambda: next(presses))
    assert stream.request.finish_reason == "cancelled"
    assert capfd.readouterr().out.startswith("plan  <promise")
    lm.scheduler.check_integrity()
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


# -- the verb --------------------------------------------------------------------------------------


@pytest.fixture
def loaded(lm: LM, monkeypatch: pytest.MonkeyPatch) -> LM:
    monkeypatch.setattr("stretto.cli.demo_parts.load", lambda *_, **__: lm)
    return lm


def test_the_verb(loaded: LM, capfd: Any) -> None:
    command = ["demo", "planned", "--index", "1"]
    with scripted(loaded, plan_of(loaded)):
        assert main([*command, "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert main(command) == 0
        out, err = capfd.readouterr()
        assert main([*command, "--quiet", "--threshold", "0"]) == 0
        assert capfd.readouterr() == ("", "")
    problem = problems(0, 2, "test", kinds=SUMS)[1]
    assert (found["prompt"], found["answer"]) == (problem.prompt, problem.total)
    assert not found["is_right"]
    assert [[s["passes"] for s in r["spans"]] for r in found["rounds"]] == PASSES
    assert found["steps"] == found["plan_steps"] + 4
    assert found["text"] == "".join(s["text"] for r in found["rounds"] for s in r["spans"])
    assert out.startswith(f"{problem.prompt}\nplan  <promise")
    assert len(out.splitlines()) == len(problem.prompt.splitlines()) + 5
    told = err.splitlines()
    assert told[0] == f"answer: wrong, the sum is {problem.total}"
    ratio = found["steps_one_by_one"] / found["steps"]
    assert told[1] == (
        f"{found['steps']} passes, {found['plan_steps']} of them for the plan; one token after the "
        f"other the text takes {found['steps_one_by_one']}, {ratio:.2f} times as many"
    )


def test_a_question_of_ones_own_is_not_judged(loaded: LM, capfd: Any) -> None:
    with scripted(loaded, plan_of(loaded)):
        assert main(["demo", "planned", "Tell me.", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert main(["demo", "planned", "Tell me."]) == 0
    assert (found["prompt"], found["answer"], found["is_right"]) == ("Tell me.", None, None)
    assert "answer:" not in capfd.readouterr().err


def test_a_model_of_ones_own(tmp_path: Path, capfd: Any) -> None:
    new_tiny(tmp_path / "m", "tiny-1m", ["a", " b"], dialect="planned")
    command = ["demo", "planned", "--model", str(tmp_path / "m"), "--max-tokens", "40", "--json"]
    assert main([*command, "--steps-ratio", "0.25"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["finish_reason"] == "length"
    assert found["steps"] > 0


def test_what_the_verb_refuses(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    new_tiny(tmp_path / "m", "tiny-1m", ["a"])
    assert main(["demo", "planned", "--model", str(tmp_path / "m")]) == 2
    assert "no spans that are written all at once" in capfd.readouterr().err
    assert main(["demo", "planned", "--steps-ratio", "0"]) == 2
    assert "steps_ratio" in capfd.readouterr().err
    assert main(["demo", "planned", "--split", "tset"]) == 2
    assert "did you mean 'test'?" in capfd.readouterr().err
    monkeypatch.setattr("stretto.models.shipped.shipped", dict)
    assert main(["demo", "planned"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "'tiny-planned' does not come with this version" in error
    assert "give its folder with --model" in error
