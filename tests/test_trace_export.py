"""`stretto trace export`: what Perfetto opens, held to the answer that it shows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from forking import forking_lm
from serving import PROMISE, SYNC, play
from typer.testing import CliRunner

from stretto import SamplingParams
from stretto.cli import app
from stretto.cli.trace_file import trace_document
from stretto.completion import Completion
from stretto.errors import InvalidInput

STORY = {
    "main": ["Zwei: ", PROMISE, ", ", PROMISE, ".", SYNC, " Ende 👩‍👩‍👧!"],
    "main.1": ["日本語 Straße"],
    "main.2": ["b c d"],
}
Event = dict[str, Any]


@pytest.fixture(scope="module")
def answer() -> tuple[Completion, dict[str, Any]]:
    """An answer, and its trace file's object."""
    lm, params = forking_lm(max_positions=2048), SamplingParams(max_tokens=400)
    stream = lm.prepare("hi", params, script=play(lm, STORY))
    lm.queue(stream)
    while not stream.request.is_done:
        lm.step(stream.request)
    document = trace_document(stream.completion, params, "pasta", lm.vocabulary)
    return stream.completion, json.loads(json.dumps(document))


@pytest.fixture(scope="module")
def events(answer: Any, tmp_path_factory: Any) -> list[Event]:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    path.write_text(json.dumps(answer[1]))
    made = json.loads(export(str(path)))
    assert made["displayTimeUnit"] == "ms"
    found = made["traceEvents"]
    assert isinstance(found, list)
    return found


def export(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(
        app, ["trace", "export", "--chrome", *arguments], input=text, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def tracks(events: list[Event]) -> dict[str, int]:
    named = [e for e in events if e["name"] == "thread_name"]
    return {e["args"]["name"].partition(":")[0]: e["tid"] for e in named}


def slices(events: list[Event], track: int) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and e["tid"] == track]


def test_each_thread_is_a_track_with_its_topic(events: list[Event], answer: Any) -> None:
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    topics = {t.id: t.topic for t in answer[0].threads}
    assert names == ["main", f"main.1: {topics['main.1']}", f"main.2: {topics['main.2']}"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["forking, pasta"]


def test_slices_are_what_the_thread_wrote_when_it_wrote_it(
    events: list[Event], answer: Any
) -> None:
    for thread in answer[0].threads:
        own = slices(events, tracks(events)[thread.id])
        prompt = [e for e in own if e["cat"] == "prompt"]
        assert [(e["ts"], e["dur"]) for e in prompt] == ([(0, 1000)] if thread.id == "main" else [])
        drawn = [e for e in own if e["cat"] != "prompt"]
        assert "".join(e["args"]["text"] for e in drawn if e["cat"] == "text") == thread.text
        assert sum(e["args"]["num_tokens"] for e in drawn) == thread.num_tokens
        assert drawn[0]["ts"] == thread.start_step * 1000
        assert drawn[-1]["ts"] + drawn[-1]["dur"] == (thread.end_step + 1) * 1000
        for before, after in itertools.pairwise(drawn):
            assert before["ts"] + before["dur"] <= after["ts"]
        for event in drawn:
            assert event["dur"] == event["args"]["num_tokens"] * 1000


def test_arrows_leave_from_and_arrive_at_slices(events: list[Event]) -> None:
    known = tracks(events)
    arrows = [e for e in events if e["ph"] in "sf"]
    for event in arrows:
        inside = [
            s for s in slices(events, event["tid"]) if s["ts"] <= event["ts"] < s["ts"] + s["dur"]
        ]
        assert len(inside) == 1, event
    starts, ends = ({e["id"]: e for e in arrows if e["ph"] == kind} for kind in "sf")
    assert starts.keys() == ends.keys()
    assert all(starts[number]["ts"] < ends[number]["ts"] for number in starts)
    pairs = sorted((e["name"], e["tid"], ends[number]["tid"]) for number, e in starts.items())
    main, one, two = known["main"], known["main.1"], known["main.2"]
    assert pairs == [
        ("fork", main, one),
        ("fork", main, two),
        ("join", one, main),
        ("join", two, main),
    ]


def test_counters_are_the_live_tokens(events: list[Event], answer: Any) -> None:
    completion = answer[0]
    counters = {
        name: [e["args"]["tokens"] for e in events if e["ph"] == "C" and e["name"] == name]
        for name in ("live tokens", "dense tokens")
    }
    steps = completion.usage.sequential_steps
    assert len(counters["live tokens"]) == len(counters["dense tokens"]) == steps
    assert max(counters["live tokens"]) == completion.live_kv.peak
    assert counters["dense tokens"][-1] == sum(len(s) for s in completion.trace.segments)
    pairs = zip(counters["live tokens"], counters["dense tokens"], strict=True)
    assert all(live <= dense for live, dense in pairs)


def test_a_file_or_stdin_to_a_file(answer: Any, events: list[Event], tmp_path: Path) -> None:
    out = tmp_path / "chrome.json"
    text = json.dumps(answer[1])
    counts = json.loads(export("-", "--out", str(out), "--json", text=text))
    assert counts == {"file": str(out), "num_events": len(events), "num_threads": 3}
    assert json.loads(out.read_text())["traceEvents"] == events


BROKEN = {
    "is not JSON": "{",
    "is no trace file": "[1]",
    "of version 9": {"version": 9},
    "damaged at threads: field required": {"threads": None},
    "segment 0 sees one that is not there": {"sees": [99]},
    "differ in number": {"steps": []},
    "damaged at segments.0.kind": {"kind": "round"},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_what_is_no_trace_file_is_refused_by_name(reason: str, answer: Any) -> None:
    change = BROKEN[reason]
    if isinstance(change, dict):
        document = json.loads(json.dumps(answer[1]))
        for name, value in change.items():
            place = document if name in document else document["segments"][0]
            place[name] = value
            if value is None:
                del place[name]
        change = json.dumps(document)
    with pytest.raises(InvalidInput) as error:
        export("-", text=change)
    assert reason.lower() in str(error.value).lower()
    assert "\n" not in str(error.value)


def test_a_format_must_be_named() -> None:
    with pytest.raises(InvalidInput, match="--chrome"):
        CliRunner().invoke(app, ["trace", "export", "-"], catch_exceptions=False)
