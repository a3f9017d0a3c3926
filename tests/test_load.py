"""The load benchmark, in miniature: what it measures, and that it goes on where it was killed."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
def cache(load: Any) -> Any:
    return sys.modules["load_cache"]


@pytest.fixture(scope="module")
def direct(load: Any) -> Any:
    return sys.modules["load_direct"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(forking_lm(max_positions=2048)) as running:
        yield running


def address(client: Any, served: Served, **changes: Any) -> Any:
    facts = {"host": "127.0.0.1", "port": served.port, "model": served.lm.name}
    return client.Address(**(facts | changes))


def test_each_client_sees_its_own_answers(served: Served, client: Any, figures: Any) -> None:
    asks = [client.Ask(n, PROMPTS[n % 3], 10 + n) for n in range(6)]
    alone, _ = client.crowd(address(client, served), asks, 1)
    seen, seconds = client.crowd(address(client, served), asks, 4)
    assert [s.number for s in seen] == list(range(6))
    for ask, one, other in zip(asks, alone, seen, strict=True):
        told = served.lm.generate(ask.prompt, SamplingParams(max_tokens=ask.max_tokens))[0]
        assert figures.is_finished(other.to_json())
        assert other.text == one.text == told.text
        assert "".join(text for text, _ in other.tokens) == told.text
        assert other.drawn_tokens == sum(thread.num_tokens for thread in told.threads)
        assert len(other.arrivals_s) == len(set(other.arrivals_s)) >= 1
        assert 0 < other.arrivals_s[0] <= other.arrivals_s[-1] <= other.total_s <= seconds
    served.check_idle()


def test_what_goes_wrong_is_told(served: Served, client: Any, figures: Any) -> None:
    for changes, error in (({"model": "other"}, "404"), ({"port": 1}, "ConnectionRefusedError")):
        seen = client.answer(address(client, served, **changes), client.Ask(0, "x", 5))
        assert not figures.is_finished(seen.to_json())
        assert seen.error.startswith(error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_request_is_lost(served: Served, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of another shape is an error of its request; a client that dies ends the run."""
    asks = [client.Ask(n, "x", 5) for n in range(3)]
    monkeypatch.setattr(client, "_take", lambda seen, chunk, now_s: chunk["nothing"])
    seen, _ = client.crowd(address(client, served), asks, 2)
    assert [s.error for s in seen] == ["KeyError: 'nothing'"] * 3

    def exits(*_: Any) -> Any:
        raise SystemExit

    monkeypatch.setattr(client, "answer", exits)
    with pytest.raises(RuntimeError, match="3 of 3 requests were lost"):
        client.crowd(address(client, served), asks, 3)


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


def cell(seconds: float, *seen: dict[str, Any], **grown: float) -> dict[str, Any]:
    gauges = {
        "passes": 10, "pass_s": 1.0, "forward_s": 0.8, "between_s": 0.03, "loop_s": 0.004,
        "aside_s": 0.002, "prompt_tokens": 40, "cached_tokens": 10, **grown,
    }  # fmt: skip
    direct = {"seconds": 2.0, "passes": 8, "pass_s": 0.8, "forward_s": 0.7, "drawn_tokens": 20}
    return {"seconds": seconds, "seen": list(seen), "gauges": gauges, "direct": direct}


def test_figures_are_what_they_are_defined_as(figures: Any) -> None:
    told = row("ab", -1.0, -2.0)
    cells = {
        (0, 1): cell(10.0, told),
        (1, 1): cell(8.0, told),
        (0, 16): cell(2.0, told, between_s=0.06),
        (1, 16): cell(2.0, row("ax", -1.0, -2.0004), between_s=0.04),
    }
    (one, many), records = figures.summary(cells)
    assert (one["tokens_per_s"], many["tokens_per_s"]) == (pytest.approx(1.125), 5.0)
    assert (one["speedup"], many["speedup"]) == (1.0, pytest.approx(4.5))
    assert (many["low"], many["high"]) == (4.0, 5.0)
    assert (many["same"], many["near_ties"], many["different"]) == (1, 1, 0)
    assert one["server_share"] == pytest.approx((0.03 + 0.004 + 0.002) / 0.8)
    assert many["between_share"] == pytest.approx(0.05 / 0.8)
    assert many["loop_share"] == pytest.approx(0.005)
    assert many["aside_share"] == pytest.approx(0.0025)
    assert many["server_share"] == pytest.approx(0.056 / 0.8)
    assert many["scheduler_share"] == pytest.approx(0.25)
    assert (many["forward_ms"], many["pass_ms"]) == (pytest.approx(80), pytest.approx(105))
    assert many["direct_forward_ms"] == pytest.approx(87.5)
    assert many["direct_pass_ms"] == pytest.approx(100)
    assert [many[f"pass_{x}"] for x in ("ratio", "low", "high")] == pytest.approx(
        [1.05, 1.04, 1.06]
    )
    assert many["direct_tokens_per_s"] == pytest.approx(10)
    assert many["gap_p50_ms"] == pytest.approx(30)
    assert len(records) == 4
    assert records[0]["text"] == "ab"
    assert records[-1]["text"] == "ax"
    assert all("tokens" not in record for record in records)
    lost = row("", finish_reason=None, error="503", ttft_s=None, gaps_s=[], drawn_tokens=0)
    (_, many), _ = figures.summary(cells | {(0, 16): cell(2.0, lost)})
    assert (many["unfinished"], many["different"]) == (1, 1)


FASTER = "16 clients: at least 4 times the tokens of one"
CHEAP = "server below 5% of the engine's time"


def told(figures: Any, changes: dict[str, Any], **cached: Any) -> list[str]:
    """What verdicts are not "yes", of a run in which all went well but for the changes."""
    good = {"unfinished": 0, "different": 0, "server_share": 0.049}
    rows = [{**good, "clients": 1}, {**good, "clients": 16, "low": 4.1, "pairs": 7, **changes}]
    met = figures.verdicts(rows, [good, {**good, **cached}])
    assert len(met) == 5  # none is ever left out
    return [f"{answer}: {what}" for what, answer in met.items() if answer != "yes"]


def test_what_is_to_be_shown_is_shown_or_not_or_not_measured(figures: Any) -> None:
    assert told(figures, {}) == []
    assert told(figures, {"low": 3.9}) == [f"no: {FASTER}"]
    assert told(figures, {"pairs": 6}) == [f"not measured: {FASTER}"]
    assert told(figures, {"clients": 8}) == [f"not measured: {FASTER}"]
    assert told(figures, {"server_share": 0.05}) == [f"no: {CHEAP}"]
    assert told(figures, {"unfinished": 1}) == ["no: all finished"]
    assert told(figures, {"different": 1}) == ["no: texts as alone"]
    assert told(figures, {}, unfinished=1) == ["no: all finished"]
    assert told(figures, {}, different=1) == ["no: texts with shared prompts as without"]
    assert told(figures, {}, server_share=0.06) == []


def test_shared_prompts_against_the_same_ones_not_shared(client: Any, cache: Any) -> None:
    asks = [cache.distinct(PROMPTS, 4, number) for number in range(2)]
    assert len({ask.prompt for own in asks for ask in own}) == 8
    assert [ask.number for ask in asks[1]] == [0, 1, 2, 3]
    assert {ask.max_tokens for ask in asks[1]} == set(client.LENGTHS)
    plain, other = row("ab", -1.0, -2.0), row("ax", -1.0, -2.5)
    cells = {
        (0, "off"): cell(1.0, plain, cached_tokens=0),
        (0, "on"): cell(1.0, plain, between_s=0.133),
        (1, "off"): cell(1.0, plain, cached_tokens=0),
        (1, "on"): cell(1.0, other, between_s=0.236),
    }
    (off, on), records = cache.summary(cells)
    assert (off["cache"], on["cache"]) == ("off", "on")
    assert (off["same"], on["same"], on["different"]) == (2, 1, 1)
    assert (off["cached_share"], on["cached_share"]) == (0, 0.25)
    assert off["pass_ratio"] == 1
    assert on["pass_ratio"] == pytest.approx(1.15)
    assert (on["pass_low"], on["pass_high"]) == (pytest.approx(1.1), pytest.approx(1.2))
    assert on["pairs"] == 2
    assert [(r["cache"], r["round"], r.get("text")) for r in records] == [
        ("off", 0, "ab"), ("off", 1, "ab"), ("on", 0, None), ("on", 1, "ax"),
    ]  # fmt: skip


def test_the_same_without_a_server(served: Served, client: Any, direct: Any) -> None:
    """As many requests at once, and the same tokens."""
    asks = [client.Ask(n, PROMPTS[n % 3], 10 + n) for n in range(6)]
    seen, _ = client.crowd(address(client, served), asks, 3)
    sizes: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(served.lm, name)

        def step(self, request: Any) -> None:
            served.lm.step(request)
            sizes.append(len(served.lm.scheduler.running))

    cell = direct.decode(Counting(), asks, 3, "auto")
    assert cell["drawn_tokens"] == sum(s.drawn_tokens for s in seen)
    assert cell["passes"] == len(sizes)
    assert max(sizes) == 3
    assert 0 < cell["forward_s"] < cell["pass_s"] < cell["seconds"]
    served.check_idle()


def test_a_killed_run_goes_on_where_it_was(
    served: Served, load: Any, direct: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[list[str]] = []

    @contextmanager
    def here(options: Any, max_requests: int, method: str) -> Iterator[Any]:
        asked.append(list(options))
        yield address(load, served, method=method)

    class Here:
        def measure(self, asks: Any, clients: int, method: str) -> Any:
            measured.append(-clients)
            return direct.decode(served.lm, asks, clients, method)

    measured: list[int] = []

    def measure(*args: Any) -> Any:
        measured.append(args[-1])
        if len(measured) == 4:
            raise KeyboardInterrupt
        return whole(*args)

    whole, machine = load.measure, load.describe_machine() | {"revision": "abc"}
    monkeypatch.setattr(load, "server", here)
    monkeypatch.setattr(load, "direct", lambda options: nullcontext(Here()))
    monkeypatch.setattr(load, "measure", measure)
    monkeypatch.setattr(load, "describe_machine", lambda: machine)
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("\n".join(["one", "", "two"]))
    command = ["--out", str(out), "--clients", "3", "--requests", "4", "--rounds", "2"]
    command += ["--prompts", str(prompts), "--cache-requests", "2", "--model", "mine"]
    with pytest.raises(KeyboardInterrupt):
        load.main(command)
    assert load.main(command) == 0
    # by number of clients, below 0 without a server; the second round the other way round
    warm = -4
    assert measured == [warm, 1, -1, 3, warm, 3, -3, -3, 3, -1, 1, 16, 16, 16, 16]
    assert asked[0][-3:] == ["--model", "mine", "--no-prefix-cache"]
    assert asked[-1][-2:] == ["--model", "mine"]
    with (out / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["clients"] for r in rows] == ["1", "3"]
    assert [(r["requests"], r["same"], r["different"]) for r in rows] == [("8", "8", "0")] * 2
    assert all(float(r["server_share"]) > float(r["loop_share"]) > 0 for r in rows)
    assert all(float(r["pass_ratio"]) > 0 for r in rows)
    with (out / "cache.csv").open() as file:
        sides = list(csv.DictReader(file))
    assert [(r["cache"], r["requests"], r["different"]) for r in sides] == [
        ("off", "4", "0"), ("on", "4", "0"),
    ]  # fmt: skip
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(records) == 16 + 8
    assert sum("text" in record for record in records) == 4 + 4
    facts = json.loads((out / "run.json").read_text())
    assert facts["shown"]["all finished"] == "yes"
    assert facts["shown"][FASTER] == "not measured"
    assert facts["engine"] == served.lm.engine.name
    assert len(facts["settings"]["prompts"]) == 2
    assert "one" not in json.dumps(facts["settings"]["prompts"])
    assert (out / "plot.png").stat().st_size > 1000
    assert sorted(p.name for p in out.iterdir()) == [
        "cache.csv", "plot.png", "requests.jsonl", "run.json", "summary.csv",
    ]  # fmt: skip
    served.check_idle()


def test_server_and_twin_are_processes_of_their_own(load: Any, client: Any, tmp_path: Path) -> None:
    tiny_lm().save(tmp_path / "tiny")
    options = ["--model", str(tmp_path / "tiny"), "--offline", "--pool-slots", "512"]
    asks = client.asks_of(PROMPTS, 2)
    with load.direct(options) as twin, load.server(options, 8, "sequential") as address:
        cell = load.measure(address, asks, 2)
        own = twin.measure(asks, 2, "sequential")
        assert twin.measure(asks, 1, "sequential")["passes"] > own["passes"]
    assert own["drawn_tokens"] == sum(seen["drawn_tokens"] for seen in cell["seen"])
    assert [seen["error"] for seen in cell["seen"]] == [None, None]
    assert cell["gauges"]["passes"] > 0
    assert 0 < cell["gauges"]["forward_s"] < cell["gauges"]["pass_s"]
    assert cell["gauges"]["between_s"] > 0
    assert cell["gauges"]["loop_s"] > 0
    assert cell["gauges"]["aside_s"] > 0
    assert cell["gauges"]["prompt_tokens"] > 0
    with pytest.raises(OSError, match="refused"):
        address.get("/health")
