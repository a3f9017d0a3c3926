"""The load benchmark, in miniature: what it measures, and that it goes on where it was killed."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forking import forking_lm
from serving import Served, serving
from tiny_lms import tiny_lm

from stretto import SamplingParams

FOLDER = Path(__file__).parents[1] / "benchmarks" / "serving"
PROMPTS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        import load

        yield load
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def client(load: Any) -> Any:
    return sys.modules["load_client"]


@pytest.fixture(scope="module")
def figures(load: Any) -> Any:
    return sys.modules["load_figures"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(forking_lm(max_positions=2048)) as running:
        yield running


def address(client: Any, served: Served, **changes: Any) -> Any:
    facts = {"host": "127.0.0.1", "port": served.port, "model": served.lm.name}
    return client.Address(**(facts | changes))


def test_each_client_sees_its_own_answers(served: Served, client: Any) -> None:
    asks = [client.Ask(n, PROMPTS[n % 3], 10 + n) for n in range(6)]
    alone, _ = client.crowd(address(client, served), asks, 1)
    seen, seconds = client.crowd(address(client, served), asks, 4)
    assert [s.number for s in seen] == list(range(6))
    for ask, one, other in zip(asks, alone, seen, strict=True):
        told = served.lm.generate(ask.prompt, SamplingParams(max_tokens=ask.max_tokens))[0]
        assert other.is_finished
        assert other.text == one.text == told.text
        assert "".join(text for text, _ in other.tokens) == told.text
        assert other.drawn_tokens == sum(thread.num_tokens for thread in told.threads)
        assert len(other.arrivals_s) == len(set(other.arrivals_s)) >= 1
        assert 0 < other.arrivals_s[0] <= other.arrivals_s[-1] <= other.total_s <= seconds
    served.check_idle()


def test_what_goes_wrong_is_told(served: Served, client: Any) -> None:
    for changes, error in (({"model": "other"}, "404"), ({"port": 1}, "ConnectionRefusedError")):
        seen = client.answer(address(client, served, **changes), client.Ask(0, "x", 5))
        assert not seen.is_finished
        assert seen.error.startswith(error)


def test_levels_ask_for_the_same(client: Any) -> None:
    asks = client.asks_of(PROMPTS, 12)
    assert len({(ask.prompt, ask.max_tokens) for ask in asks}) == 12
    assert {ask.max_tokens for ask in asks} == set(client.LENGTHS)


def row(text: str, *logprobs: float, **changes: Any) -> dict[str, Any]:
    tokens = list(zip(text, logprobs, strict=True))
    return {
        "request": 0, "error": None, "finish_reason": "stop", "text": text, "tokens": tokens,
        "ttft_s": 0.1, "gaps_s": [0.02, 0.04], "drawn_tokens": 10, **changes,
    }  # fmt: skip


def test_texts_may_differ_at_a_near_tie_alone(client: Any) -> None:
    alone = row("abc", -1.0, -2.0, -3.0)
    assert client.compared(alone, row("abc", -1.0, -2.1, -3.0)) == ("same", None)
    kind, gap = client.compared(alone, row("axy", -1.0, -2.0005, -9.0))
    assert (kind, gap) == ("near tie", pytest.approx(0.0005))
    assert client.compared(alone, row("axc", -1.0, -2.5, -3.0))[0] == "different"
    assert client.compared(alone, row("ab", -1.0, -2.0)) == ("different", None)
    sure, other = row("ab", -0.1, -0.0001), row("ac", -0.1, -0.0002)
    assert client.compared(sure, other)[0] == "different"


def cell(seconds: float, *seen: dict[str, Any], between: float = 0.03) -> dict[str, Any]:
    gauges = {"passes": 10, "pass_s": 1.0, "forward_s": 0.8, "between_s": between, "loop_s": 0.1}
    return {"seconds": seconds, "seen": list(seen), "gauges": gauges}


def test_figures_are_what_they_are_defined_as(figures: Any) -> None:
    told = row("ab", -1.0, -2.0)
    cells = {
        (0, 1): cell(10.0, told),
        (1, 1): cell(8.0, told),
        (0, 16): cell(2.0, told, between=0.06),
        (1, 16): cell(2.0, row("ax", -1.0, -2.0004), between=0.04),
    }
    (one, many), records = figures.summary(cells)
    assert (one["tokens_per_s"], many["tokens_per_s"]) == (pytest.approx(1.125), 5.0)
    assert (one["speedup"], many["speedup"]) == (1.0, pytest.approx(4.5))
    assert (many["low"], many["high"]) == (4.0, 5.0)
    assert (many["same"], many["near_ties"], many["different"]) == (1, 1, 0)
    assert many["server_share"] == pytest.approx(0.05)
    assert many["scheduler_share"] == pytest.approx(0.25)
    assert many["gap_p50_ms"] == pytest.approx(30)
    assert len(records) == 4
    assert records[0]["text"] == "ab"
    assert records[-1]["text"] == "ax"
    assert all("tokens" not in record for record in records)
    met = figures.verdicts([one, many])
    assert met["16 clients: at least 4 times the tokens of one"]
    assert met["texts as alone"]
    assert not met["server below 5% of a pass"]
    lost = row("", finish_reason=None, error="503", ttft_s=None, gaps_s=[], drawn_tokens=0)
    (_, many), _ = figures.summary(cells | {(0, 16): cell(2.0, lost)})
    assert (many["unfinished"], many["different"]) == (1, 1)
    met = figures.verdicts([one, many])
    assert not met["all finished"]
    assert not met["texts as alone"]


def test_a_killed_run_goes_on_where_it_was(
    served: Served, load: Any, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    @contextmanager
    def here(options: Any, max_requests: int, method: str) -> Iterator[Any]:
        asked.append(list(options))
        yield address(client, served, method=method)

    measured: list[int] = []

    def measure(*args: Any) -> Any:
        measured.append(args[-1])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return whole(*args)

    whole, machine = load.measure, load.describe_machine() | {"revision": "abc"}
    monkeypatch.setattr(load, "server", here)
    monkeypatch.setattr(load, "measure", measure)
    monkeypatch.setattr(load, "describe_machine", lambda: machine)
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("\n".join(["one", "", "two"]))
    command = ["--out", str(out), "--clients", "3", "--requests", "4", "--rounds", "2"]
    command += ["--prompts", str(prompts), "--model", "mine"]
    with pytest.raises(KeyboardInterrupt):
        load.main(command)
    assert load.main(command) == 0
    assert measured == [1, 3, 3, 3, 1]  # the second round the other way round
    assert asked[0][-2:] == ["--model", "mine"]
    with (out / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["clients"] for r in rows] == ["1", "3"]
    assert [(r["requests"], r["same"], r["different"]) for r in rows] == [("8", "8", "0")] * 2
    assert all(float(r["server_share"]) > 0 for r in rows)
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(records) == 16
    assert sum("text" in record for record in records) == 4
    facts = json.loads((out / "run.json").read_text())
    assert facts["shown"]["all finished"]
    assert facts["engine"] == served.lm.engine.name
    assert len(facts["settings"]["prompts"]) == 2
    assert "one" not in json.dumps(facts["settings"]["prompts"])
    assert (out / "plot.png").stat().st_size > 1000
    assert sorted(p.name for p in out.iterdir()) == [
        "plot.png", "requests.jsonl", "run.json", "summary.csv",
    ]  # fmt: skip
    served.check_idle()


def test_the_server_is_a_process_of_its_own(load: Any, client: Any, tmp_path: Path) -> None:
    tiny_lm().save(tmp_path / "tiny")
    options = ["--model", str(tmp_path / "tiny"), "--offline", "--pool-slots", "512"]
    with load.server(options, 8, "sequential") as address:
        cell = load.measure(address, PROMPTS, 2, 2)
    assert [seen["error"] for seen in cell["seen"]] == [None, None]
    assert cell["gauges"]["passes"] > 0
    assert 0 < cell["gauges"]["forward_s"] < cell["gauges"]["pass_s"]
    assert cell["gauges"]["between_s"] > 0
    assert cell["gauges"]["loop_s"] > 0
    with pytest.raises(OSError, match="refused"):
        address.get("/health")
