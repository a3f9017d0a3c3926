"""`stretto bench scale`: memory is exact where it is counted; times are only there."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench_peers import SMALL, silent, small_target

from stretto.bench import memory, pairs, scale
from stretto.bench.journal import Journal
from stretto.bench.memory import Spec, Usage
from stretto.bench.peer_transformers import TransformersSide
from stretto.bench.source import Source, random_model
from stretto.cli import main
from stretto.errors import InvalidInput, StrettoError

SLOT_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, layers, kv heads, head dimension, float32


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(pairs, "PAUSE_S", 0.0)
    monkeypatch.setattr(Source, "hf_model", lambda _, dtype: random_model(1, dtype, **SMALL))

    def target(self: Source, *, room: tuple[int, int], **_: Any) -> Any:
        return small_target(slots=room[1])

    monkeypatch.setattr(Source, "target", target)
    return Source()


def plan(**changes: Any) -> scale.Plan:
    settings: dict[str, Any] = {
        "threads": [1, 3], "contexts": [20, 40], "pool_slots": [0, 600], "steps": 4, "pairs": 2,
        "seed": 0, "copies": True, "copy_limit_bytes": 2**40,
    }  # fmt: skip
    return scale.Plan(**{**settings, **changes})


def test_rows_of_scale() -> None:
    targets = [small_target(slots=200), small_target(slots=600)]
    side = TransformersSide(random_model(1, "float32", **SMALL))
    limited = plan(copy_limit_bytes=3 * 30 * SLOT_BYTES)
    rows, records = scale.measure(
        targets, side, limited, Journal(None, {}, silent, revision="abc"), silent
    )
    assert [(r["pool_slots"], r["context"], r["threads"]) for r in rows] == [
        (slots, context, n) for slots in (200, 600) for context in (20, 40) for n in (1, 3)
    ]
    for row in rows:
        assert 0 < row["low"] <= row["over_one"] <= row["high"]
        assert row["token_ms"] > 0
        assert row["pairs"] == 2
    # 3 copies of 40 + 5 tokens are above the limit; the second pool has nothing beside it.
    assert [r["copy_ratio"] is not None for r in rows] == [True, True, True, False] + [False] * 4
    assert all(r["over_one"] == 1 for r in rows if r["threads"] == 1)
    assert len(records) == 2 * 2 * 2 * 2
    assert {r["pair"] for r in records} == {0, 1}


def test_slots_are_shared_and_copies_are_not(small_source: Source) -> None:
    assert memory.bytes_of_slot(small_target().engine) == SLOT_BYTES + 8  # and a position
    spec = Spec("own", small_source, "float32", "hf", None, 50, [1, 2, 8], 4, 0)
    own = memory.measure_here(spec)
    slot_bytes = own[0].slot_bytes
    # Main's last token, and per thread its start, and four drawn tokens that are fed.
    assert [u.kv_bytes // slot_bytes for u in own] == [50 + n * 5 for n in (1, 2, 8)]
    copies = memory.measure_here(Spec("copying", small_source, "float32", "", 1, 50, [1, 8], 4, 0))
    assert [u.kv_bytes for u in copies] == [n * 55 * SLOT_BYTES for n in (1, 8)]
    assert all(u.rss_bytes is None or u.rss_bytes >= 0 for u in (*own, *copies))


def test_ratios_of_memory() -> None:
    own = [Usage(1000, 2000, 10), Usage(1050, 2400, 10)]
    first, second = scale.memory_rows(90, [1, 2], own, {2: Usage(2000, 4000, 10)}, steps=4)
    assert (first["kv_ratio"], first["rss_ratio"], first["copy_kv_bytes"]) == (1, 1, None)
    assert second["kv_ratio"] == 1
    assert second["rss_ratio"] == pytest.approx(2400 / 2050, rel=1e-4)
    assert second["copy_kv_over_own"] == pytest.approx(2000 / 1050, rel=1e-4)
    unsaid = scale.memory_rows(90, [2], [Usage(1000, None, 10)], {}, steps=4)[0]
    assert unsaid["kv_ratio"] is unsaid["rss_ratio"] is unsaid["rss_bytes"] is None


def test_resident_memory_is_seen_to_grow() -> None:
    if memory.resident_bytes() is None:
        pytest.skip("this system does not say how much memory is resident")
    peak = memory.Peak()
    with peak:
        grown = torch.ones(8 * 2**20)
    assert grown.numel() * 4 * 0.9 < (peak.growth or 0) < 1.5 * grown.numel() * 4
    assert memory.available_bytes() > 0


def test_an_error_for_users_comes_through_unchanged() -> None:
    spec = Spec("own", Source("no-such-model"), "auto", "auto", 1, 8, [1], 1, 0)
    with pytest.raises(InvalidInput) as here:
        memory.measure_here(spec)
    with pytest.raises(InvalidInput) as apart:
        memory.measure_apart(spec)
    assert str(apart.value) == str(here.value)


def test_less_is_advised_only_where_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_says = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    for error in (MemoryError(), RuntimeError(torch_says)):
        assert memory._failure(error)[0] == "memory"
    assert memory._ended(-9)[0] == "memory"
    assert memory._ended(-11) == ("bug", "its process ended with status -11")
    kind, text = memory._failure(ValueError("odd"))
    assert (kind, text.splitlines()[-1]) == ("bug", "ValueError: odd")

    def told(answer: tuple[str, str]) -> Exception:
        monkeypatch.setattr(memory, "_ended", lambda status: answer)
        monkeypatch.setattr(memory, "_run", no_words)
        with pytest.raises((StrettoError, RuntimeError)) as caught:
            memory.measure_apart(Spec("own", Source(), "auto", "auto", 1, 8, [1], 1, 0))
        return caught.value

    full = told(("memory", "full"))
    assert isinstance(full, StrettoError)
    assert str(full).endswith("prefix of 8 tokens failed: full; ask for less")
    odd = told(("bug", "odd"))
    assert isinstance(odd, RuntimeError)
    assert "ask for less" not in str(odd)


def no_words(spec: Spec, sender: Any) -> None:
    """Of a process that ends before it has said anything."""


def test_scale_command(
    small_source: Source, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(memory, "measure_apart", memory.measure_here)
    arguments = ["bench", "scale", "--forks", "2,1", "--context", "20", "--tokens", "2"]
    arguments += ["--pairs", "2", "--pool-slots", "0,300", "--dtype", "float32"]
    assert main([*arguments, "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert set(result) == {"rows", "memory", "machine"}
    assert [(r["pool_slots"], r["threads"]) for r in result["rows"]] == [
        (28, 1), (28, 2), (300, 1), (300, 2)
    ]  # fmt: skip
    assert [r["kv_ratio"] for r in result["memory"]] == [1, 1]
    with (tmp_path / "memory.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["settings"]["forks"] == [1, 2]
    assert {"kv_ratio", "token_ms"} <= set(run["definitions"])
    assert main([*arguments, "--no-copying"]) == 0
    assert "memory:" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--forks", "0"], "--forks"),
        (["--pool-slots", "-1"], "--pool-slots"),
        (["--context", "1"], "--context"),
        (["--tokens", "0"], "--tokens"),
        (["--copy-limit", "-1"], "--copy-limit"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scale", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert named in captured.err
