"""Graphs of what steps read: by a scorer that knows, by a teacher; kept and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_kit import Server, completion

from stretto.cli import main
from stretto.data.annotators import Exhausted, Refusal, Unanswered
from stretto.data.client import Endpoint
from stretto.data.graph_find import find_graphs
from stretto.data.graph_likelihood import LikelihoodGraphs, lay_out
from stretto.data.graph_steps import missing_edges, steps_of, symbol_reads
from stretto.data.graph_teacher import TeacherGraphs, read_reply
from stretto.data.graphs import Graph
from stretto.data.items import Item
from stretto.data.likelihood_views import Sheet
from stretto.data.rows import Reject, read_rows
from stretto.data.store import Store
from stretto.problems import Problem, problem
from stretto.problems.rows import graph_of

PROBLEMS = [problem(task, 10, index=k) for task in ("program", "tree", "dag") for k in range(2)]


def item_of(one: Problem) -> Item:
    return Item(one.prompt, one.response())


# -- steps and symbols -----------------------------------------------------------------------------


def test_responses_are_cut_into_steps() -> None:
    text = "\n First, 3.\nThen two. And 1.5!\n\nSo it is.\n"
    cuts = {cut: [text[a:b] for a, b in steps_of(text, cut)] for cut in
            ("lines", "paragraphs", "sentences")}  # fmt: skip
    assert cuts["lines"] == [" First, 3.\n", "Then two. And 1.5!\n\n", "So it is.\n"]
    assert cuts["paragraphs"] == ["First, 3.\nThen two. And 1.5!\n\n", "So it is.\n"]
    assert [s.strip() for s in cuts["sentences"]] == [
        "First, 3.", "Then two.", "And 1.5!", "So it is.",
    ]  # fmt: skip
    for steps in cuts.values():
        assert text.endswith("".join(steps))
    assert steps_of(" \n ", "lines") == []


def test_steps_read_who_set_their_names_and_came_to_their_numbers() -> None:
    steps = ["Let x = 7.", "Then y = x + 5 = 12.", "x = 12 - 2", "So 12 * 5 and x", "And 7 again"]
    assert symbol_reads("Add 5.", steps) == [[], [0], [0, 1], [1, 2], [0]]


# -- by likelihood ---------------------------------------------------------------------------------


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


class Knowing:
    """A scorer whose steps lose 3 nats at their last token for each needed step that is hidden."""

    name = "knowing"
    vocabulary = Letters()

    def __init__(self, one: Problem, max_positions: int = 10_000) -> None:
        self.max_positions = max_positions
        self.sheets: list[Sheet] = []
        self._steps = [step.text for step in one.steps]
        self._reads = one.reads

    def prompt_ids(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def score(self, sheets: Sequence[Sheet]) -> list[list[Any]]:
        self.sheets += sheets
        return [[self._read(sheet, r.segment) for r in sheet.readings] for sheet in sheets]

    def _read(self, sheet: Sheet, number: int) -> Any:
        segments = sheet.trace.segments
        texts = ["".join(map(chr, s.tokens)) for s in segments]
        step = self._steps.index(texts[number])
        seen = {texts[k] for k in segments[number].sees}
        hidden = [j for j in self._reads[step] if self._steps[j] not in seen]
        logprobs = np.full(len(texts[number]), -0.5, dtype=np.float32)
        logprobs[-1] -= 3 * len(hidden)
        return logprobs


@pytest.mark.parametrize("one", PROBLEMS, ids=lambda one: one.id)
def test_hiding_what_is_needed_finds_the_known_graph(one: Problem) -> None:
    found = LikelihoodGraphs(Knowing(one)).find(item_of(one), one.spans)
    known = graph_of(one)
    assert isinstance(found, Graph)
    assert missing_edges(found, known) == []
    assert found.steps == known.steps
    losses = LikelihoodGraphs(Knowing(one)).losses(
        [1], [Letters().encode(s.text) for s in one.steps]
    )
    needed = {(k, j) for k, reads in enumerate(one.reads) for j in reads if j < k - 1}
    assert {pair for pair, loss in losses.items() if loss > 1} == needed
    assert all(loss in (0, 3) for loss in losses.values())


def test_a_graph_that_lacks_edges_is_told_by_them() -> None:
    one = PROBLEMS[0]
    known = graph_of(one)
    deaf = LikelihoodGraphs(Knowing(one), max_loss=100).find(item_of(one), one.spans)
    assert isinstance(deaf, Graph)
    symbols = symbol_reads(one.prompt, [s.text for s in one.steps])
    wanted = [(k, j) for k, reads in enumerate(one.reads) for j in reads
              if j != k - 1 and j not in symbols[k]]  # fmt: skip
    assert missing_edges(deaf, known) == wanted
    assert deaf.details["edges"]["found"] == 0


def test_every_pair_is_laid_out_once_however_small_the_sheets() -> None:
    steps = [[k] * 4 for k in range(7)]
    pairs = {(k, j) for k in range(7) for j in range(k - 1)}
    for most in (1, 40, 100, 10_000):
        sheets = list(lay_out([0, 0], steps, most))
        asked = [pair for laid in sheets for pair in laid.hidden]
        assert sorted(asked) == sorted(pairs)
        for laid in sheets:
            assert len(laid.hidden) == 1 or laid.sheet.num_tokens <= most
            segments = laid.sheet.trace.segments
            for (step, hidden), number in laid.hidden.items():
                branch = segments[laid.sheet.readings[number].segment]
                plain = segments[laid.sheet.readings[laid.whole[step]].segment]
                assert plain.sees - branch.sees == {hidden + 1}
                assert branch.sees <= plain.sees
                assert (branch.tokens, branch.positions) == (plain.tokens, plain.positions)


def test_a_response_that_is_too_long_is_refused() -> None:
    one = PROBLEMS[0]
    found = LikelihoodGraphs(Knowing(one, max_positions=20)).find(item_of(one), one.spans)
    assert isinstance(found, Refusal)
    assert found.reasons[0].startswith("too-long: ")


# -- by a teacher ----------------------------------------------------------------------------------

RESPONSE = "a is two\nb is three\nso nine\n"
ITEM = Item("What?", RESPONSE)
SPANS = steps_of(RESPONSE, "lines")
GOOD = json.dumps({"needs": {"1": [], "2": [], "3": [1, 2]}})


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("no", "no-graph"), ("{", "no-graph"), ("[]", "no-graph"), ('{"needs": []}', "no-graph"),
        ('{"needs": {"1": [], "2": []}}', "other-steps"),
        ('{"needs": {"1": [], "2": [], "3": [], "4": []}}', "other-steps"),
        ('{"needs": {"1": [1], "2": [], "3": []}}', "bad-step"),
        ('{"needs": {"1": [], "2": [0], "3": []}}', "bad-step"),
        ('{"needs": {"1": [], "2": [true], "3": []}}', "bad-step"),
        ('{"needs": {"1": [], "2": "1", "3": []}}', "bad-step"),
    ],
)  # fmt: skip
def test_replies_are_read_strictly(reply: str, said: str) -> None:
    found = read_reply(reply, 3)
    assert isinstance(found, str)
    assert found.startswith(said)


def test_a_good_reply_is_found_among_thoughts() -> None:
    assert read_reply(f'<think>{{"needs": 3}}</think>Here: {GOOD}', 3) == [[], [], [0, 1]]


@contextmanager
def asking(replies: Sequence[Any], raw: Path, **options: Any) -> Iterator[tuple[Any, Server]]:
    """A teacher, and an endpoint that gives these replies in turn, the last one for ever."""

    def respond(request: dict[str, Any], number: int) -> Any:
        reply = replies[min(number, len(replies) - 1)]
        return (200, completion(reply), {}) if isinstance(reply, str) else reply

    with Server(respond) as server:
        endpoint = Endpoint("teacher-1", server.url, max_attempts=1, **options)
        teacher = TeacherGraphs(endpoint, raw, concurrency=1)
        try:
            yield teacher, server
        finally:
            teacher.close()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")


def test_a_teacher_is_asked_once_more_and_paid_once(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    with asking(["nothing", GOOD], raw) as (teacher, server):
        found = teacher.find(ITEM, SPANS)
        assert len(server.requests) == 2
        assert "no-graph" in server.requests[1]["messages"][-1]["content"]
    assert isinstance(found, Graph)
    assert found.reads == [[], [0], [0, 1]]
    assert found.details["edges"] == {"found": 2, "symbols": 0, "follow": 1}
    assert found.details["rounds"] == 2
    with asking(["never asked"], raw) as (teacher, server):
        assert teacher.find(ITEM, SPANS) == found
        assert server.requests == []
    with asking(["nothing"], tmp_path / "other.jsonl") as (teacher, _):
        assert isinstance(teacher.find(ITEM, SPANS), Refusal)


# -- files -----------------------------------------------------------------------------------------


class Scripted:
    """Finds no edges; raises what it is told to, by response."""

    name, concurrency = "scripted", 2

    def __init__(self, errors: dict[str, Exception] | None = None) -> None:
        self.errors = errors or {}
        self.asked: list[str] = []
        self.stopped = 0

    def find(self, item: Item, spans: Any) -> Graph | Refusal:
        self.asked.append(item.response)
        if item.response in self.errors:
            raise self.errors[item.response]
        if item.response.startswith("bad"):
            return Refusal(["bad: it is"])
        return Graph(id=item.key, steps=[*spans], reads=[[] for _ in spans], details={"edges": {}})

    def stop(self) -> None:
        self.stopped += 1


def run(tmp_path: Path, finder: Scripted, items: list[Item], **options: Any) -> dict[str, Any]:
    with (
        Store(tmp_path / "graphs.jsonl", Graph) as graphs,
        Store(tmp_path / "rejects.jsonl", Reject) as rejects,
    ):
        found = find_graphs(
            items, finder, graphs, rejects, **{"cut": "lines", "known": {}, **options}
        )
    return found.to_json()


def test_what_is_left_is_found_by_a_later_run(tmp_path: Path) -> None:
    items = [Item(f"p{k}", text) for k, text in enumerate(["a\n", "bad\n", "c\n", "d\n", ""])]
    first = run(tmp_path, Scripted({"c\n": Unanswered("not now")}), items)
    assert (first["graphs"], first["rejected"], first["left"]) == (2, 2, 1)
    finder = Scripted()
    last = run(tmp_path, finder, items)
    assert finder.asked == ["c\n"]
    assert (last["graphs"], last["rejected"], last["left"]) == (3, 2, 0)


def test_a_run_that_can_do_no_more_stops(tmp_path: Path) -> None:
    items = [Item(f"p{k}", f"{k}\n") for k in range(30)]
    finder = Scripted({f"{k}\n": Exhausted("the money is spent") for k in range(30)})
    found = run(tmp_path, finder, items)
    assert found["stopped"] == "the money is spent"
    assert found["left"] == 30
    assert len(finder.asked) <= 4
    assert finder.stopped
    heard = run(tmp_path, Scripted(), items, is_interrupted=lambda: True)
    assert heard["stopped"] == "interrupted"
    assert heard["graphs"] + heard["left"] == 30


def test_known_steps_are_taken_and_missing_edges_counted(tmp_path: Path) -> None:
    one = PROBLEMS[0]
    known = graph_of(one)
    found = run(tmp_path, Scripted(), [item_of(one)], known={known.key: known})
    edges = sum(map(len, one.reads))
    assert found["known"] == {"graphs": 1, "edges": edges, "missing": edges}
    (graph,) = read_rows(tmp_path / "graphs.jsonl", Graph)
    assert graph.steps == known.steps


def test_the_command_asks_a_teacher_and_labels_follow(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "graphs.jsonl"
    rows.write_text(json.dumps({"prompt": ITEM.prompt, "response": RESPONSE}) + "\n")
    with Server(lambda request, number: (200, completion(GOOD), {})) as server:
        asked = ["data", "graphs", str(rows), "--by", "teacher", "--model", "teacher-1",
                 "--base-url", server.url, "--out", str(out), "--json", "--quiet"]  # fmt: skip
        for _ in range(2):
            assert main(asked) == 0
            found = json.loads(capfd.readouterr().out)
            assert (found["graphs"], found["steps"], found["left"]) == (1, 3, 0)
        assert len(server.requests) == 1
        assert main([*asked, "--cut", "sentences"]) == 2
        assert "cut" in capfd.readouterr().err
    (graph,) = read_rows(out, Graph)
    assert graph.reads == [[], [0], [0, 1]]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--by", "guess"), "guess"), (("--by", "teacher"), "--model"),
        (("--by", "likelihood", "--cap", "1"), "--cap"),
        (("--by", "likelihood", "--max-loss", "0"), "--max-loss"),
        (("--by", "likelihood", "--cut", "words"), "words"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line(
    more: tuple[str, ...], named: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "p", "response": "r"}) + "\n")
    assert main(["data", "graphs", str(rows), "--out", str(tmp_path / "g.jsonl"), *more]) == 2
    assert named in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "g.jsonl").exists()
