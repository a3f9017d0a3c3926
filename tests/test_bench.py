"""`stretto bench`: counts are exact; times are only checked for being there."""

from __future__ import annotations

import csv
import json
import math
import random
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_model
from stubs import StubEngine

from stretto.bench import forks, linears, machine, report, step
from stretto.bench.bookkeeping import count_bookkeeping
from stretto.bench.journal import Journal
from stretto.bench.machine import (
    FEATURES,
    Speeds,
    describe_machine,
    matmul_dtype,
    matmul_peak,
    read_bandwidth,
)
from stretto.bench.pairs import bootstrap_median, rounded, run_pair
from stretto.bench.program import (
    ForkProgram,
    Target,
    Work,
    child_name,
    drawn_tokens,
    last_step,
    weight_bytes,
)
from stretto.cli import main
from stretto.engines.hf import HFEngine
from stretto.errors import InvalidInput
from stretto.params import SamplingParams
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler

FORK_KEYS = ["forks", "tokens", "theoretical", "realized", "low", "high", "pairs"]
FORK_KEYS += ["parallel_steps", "sequential_steps", "parallel_s", "sequential_s"]
FORK_KEYS += ["parallel_step_ms", "sequential_step_ms"]


SPEEDS = Speeds(10**9, 10**9)


def text_of(ids: Any) -> str:
    return "".join(f" {i}" for i in ids)


def stub_target(**changes: int) -> Target:
    return Target(StubEngine(**changes), list(range(3, 60)), text_of, "stub")


@pytest.fixture(scope="module")
def tiny_target() -> Target:
    engine = HFEngine(tiny_model("llama"), 512)
    return Target(engine, list(range(2, 90)), text_of, "tiny", "float32", weight_bytes=1000)


def silent(line: str) -> None:
    pass


def fresh() -> Journal:
    return Journal(None, {}, silent, revision="abc")


# -- forks -------------------------------------------------------------------------------------


def test_rows_of_forks(tiny_target: Target) -> None:
    rows, records = forks.measure(
        tiny_target,
        [1, 3],
        num_tokens=5,
        num_prompt=7,
        num_pairs=2,
        seed=0,
        journal=fresh(),
        report=silent,
    )
    assert [list(row) for row in rows] == [FORK_KEYS] * 2
    assert [row["theoretical"] for row in rows] == [1.0, 3.0]
    assert [(row["parallel_steps"], row["sequential_steps"]) for row in rows] == [(5, 5), (5, 15)]
    for row in rows:
        assert 0 < row["low"] <= row["realized"] <= row["high"]
        assert row["pairs"] == 2
        assert row["parallel_step_ms"] == pytest.approx(200 * row["parallel_s"], rel=1e-3)
    assert [(r["forks"], r["pair"], r["side"], r["position"]) for r in records[:4]] == [
        (1, 0, "parallel", 0),
        (1, 0, "sequential", 1),
        (1, 1, "parallel", 1),
        (1, 1, "sequential", 0),
    ]
    assert len(records) == 8
    one = [r["decode_s"] for r in records if r["forks"] == 3 and r["side"] == "parallel"]
    assert rows[1]["parallel_s"] == pytest.approx(sum(one) / 2, rel=1e-4)


def test_both_sides_decode_the_same_tokens_one_row_per_thread_and_step() -> None:
    target = stub_target()
    work = forks.make_workload(target, 4, 6, 10, seed=1)
    assert work == forks.make_workload(target, 4, 6, 10, seed=1)
    assert work != forks.make_workload(target, 4, 6, 10, seed=2)
    assert [len(chunk) for chunk in work.chunks] == [6] * 4
    engine: Any = target.engine
    parallel, sequential = forks.make_parallel(target, work), forks.make_sequential(target, work)
    assert forks.decode(target, parallel).steps == 6
    # The prompt, the first token, and per fork its injected token and all drawn ones but the last.
    assert (engine.num_rows, engine.num_passes) == (10 + 1 + 4 * 6, 7)
    assert forks.decode(target, sequential).steps == 24
    assert engine.num_rows == 35 + 10 + 1 + 4 * 6 - 1
    assert [drawn_tokens(parallel, child_name(i)) for i in range(4)] == work.chunks
    assert drawn_tokens(sequential, "main") == [work.first, *chain(*work.chunks)]
    assert (last_step(parallel), last_step(sequential)) == (7, 25)


def test_different_tokens_on_the_two_sides_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = stub_target()
    work = forks.make_workload(target, 2, 3, 5, seed=0)
    other = forks.make_workload(target, 2, 3, 5, seed=1)
    make = forks.make_sequential
    monkeypatch.setattr(forks, "make_sequential", lambda target, _: make(target, other))
    with pytest.raises(AssertionError, match="same tokens"):
        forks._pair(target, work, 0)


def test_too_little_room_is_refused_with_both_numbers() -> None:
    options: Any = {"num_prompt": 8, "num_pairs": 1, "seed": 0, "journal": fresh()}
    options |= {"report": silent}
    with pytest.raises(InvalidInput, match=r"489 positions .* 64"):
        forks.measure(stub_target(max_positions=64), [1, 8], num_tokens=60, **options)
    with pytest.raises(InvalidInput, match=r"497 KV slots .* 490"):
        forks.measure(stub_target(num_slots=490), [8], num_tokens=60, **options)
    seeded: Any = {"seed": 0, "journal": fresh(), "report": silent, "speeds": SPEEDS}
    with pytest.raises(InvalidInput, match="138 KV slots"):
        step.measure(stub_target(num_slots=137), [1, 12], [18], num_pairs=1, **seeded)


# -- step --------------------------------------------------------------------------------------


def test_rows_of_step(tiny_target: Target) -> None:
    rows, records = step.measure(
        tiny_target, [1, 3], [2, 20], num_pairs=3, seed=0, journal=fresh(), report=silent,
        speeds=SPEEDS,
    )  # fmt: skip
    assert [(row["context"], row["rows"]) for row in rows] == [(2, 1), (2, 3), (20, 1), (20, 3)]
    for row in rows:
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert 0 < row["step_low"] <= row["step_ratio"] <= row["step_high"]
        assert 0 < row["pass_ms"] < row["step_ms"]
        assert 0 < row["scheduler_share"] < 1
    assert len(records) == 4 * 3 * 2
    work = Work(linear_weights=500, attention_width=10)
    full = step.with_rooflines(rows, tiny_target.weight_bytes, work)
    assert full[0]["bandwidth_share"] == pytest.approx(1e-3 / rows[0]["pass_ms"], rel=1e-3)
    flops = 3 * (2 * 500 + 4 * 10 * 20)
    assert full[3]["flops_share"] == pytest.approx(flops * 1e-6 / rows[3]["pass_ms"], rel=1e-3)
    unknown = step.with_rooflines(rows, None, None)[0]
    assert unknown["bandwidth_share"] is unknown["flops_share"] is None


def test_shares_are_of_the_speeds_of_the_process_that_timed_the_row(
    tiny_target: Target, tmp_path: Path
) -> None:
    def measure(contexts: list[int], speeds: Speeds) -> list[dict[str, Any]]:
        journal = Journal(tmp_path, {}, silent, revision="abc")
        return step.measure(
            tiny_target, [1], contexts, num_pairs=1, seed=0, journal=journal, report=silent,
            speeds=speeds,
        )[0]  # fmt: skip

    measure([2], Speeds(10**9, 10**9))
    before = Speeds(2 * 10**9, 3 * 10**9)
    rows = measure([2, 20], before)
    now = before.faster(Speeds(10**9, 4 * 10**9))
    rows = step.with_rooflines(step.with_speeds(rows, before, now), 1000, None)
    assert [r["read_bytes_per_s"] for r in rows] == [10**9, 2 * 10**9]
    assert [r["matmul_flops"] for r in rows] == [10**9, 4 * 10**9]
    for row in rows:
        share = 1000 / (row["pass_ms"] / 1000) / row["read_bytes_per_s"]
        assert row["bandwidth_share"] == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_work_counts_the_weights_that_rows_are_multiplied_by(kind: str) -> None:
    model = tiny_model(kind)
    linear = [m for m in model.modules() if type(m).__name__ == "Linear"]
    work = Work.of(model.config)
    assert work.linear_weights == sum(m.weight.numel() for m in linear)
    assert work.attention_width == 2 * 4 * 8


def test_a_step_draws_and_logs_what_it_draws() -> None:
    """The step that is timed chooses its tokens: nothing is forced but main's one."""
    target = stub_target()
    request = step._request(target, [2, 1], 10, seed=0)
    step._decode(target, request)
    first, second = (drawn_tokens(request, child_name(i)) for i in (0, 1))
    assert len(first) == len(second) == step.BURST_TOKENS - 1
    assert first != second


def test_bursts_alternate_over_one_prefix_computed_once() -> None:
    target = stub_target()
    pairs = step.measure_bursts(target, 5, 100, 3, seed=0)
    assert [(ours.rows, one.rows) for ours, one in pairs] == [(5, 1)] * 3
    engine: Any = target.engine
    assert engine.num_rows == 100 + 4 * (5 + 1) * step.BURST_TOKENS


def test_bursts_free_their_slots() -> None:
    target = stub_target()
    sizes = [2, 1, 2, 1]
    request = step._request(target, sizes, 30, seed=0)
    passes = step._decode(target, request)
    assert [p.rows for p in passes[1:]] == [3] + [2] * 9 + [1] * 10 + [2] * 10 + [1] * 10
    assert request.memory.peak_pages == step.room_needed(2, 30)[1]
    assert request.memory.num_pages == 0


def test_linear_layers_alone() -> None:
    library = pytest.importorskip("stretto.kernels.library")
    try:
        library.load()
    except library.KernelsUnavailable as error:
        pytest.skip(str(error))
    from stretto.engines.fused import FusedEngine

    model = tiny_model("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    engine = FusedEngine(model, 64)
    engine.keys.fill_(2.0)
    found = linears.measure(engine, 1e9, seed=0)
    assert found is not None
    assert bool((engine.keys == 2.0).all())  # nothing of a pass is left behind
    assert 0 < found["linear_low"] <= found["linear_share"] <= found["linear_high"]
    expected = found["linear_bytes"] / found["linear_ms"] * 1000 / 1e9
    assert found["linear_share"] == pytest.approx(expected, rel=1e-3)
    assert linears.measure(HFEngine(model, 8), 1e9, seed=0) is None


# -- counted bookkeeping -----------------------------------------------------------------------


def test_bookkeeping_does_not_grow_with_the_context() -> None:
    short, long = (count_bookkeeping([1, 4, 16], [context]) for context in (200, 8000))
    assert [row["rows"] for row in short] == [1, 4, 16]
    for row, same in zip(short, long, strict=True):
        assert row | {"context": 8000} == same
        assert row["entries_per_token"] == 1
        assert row["entries_per_fork"] <= 4
        assert (row["fork_slots"], row["fork_rows"]) == (0, 1)


@pytest.mark.parametrize("context", [200, 8000])
@pytest.mark.parametrize("num_forks", [1, 4, 16])
def test_a_fork_takes_one_slot_and_one_row(context: int, num_forks: int) -> None:
    """Per step: entries touched, pages taken and rows fed are O(rows), whatever the context."""
    engine = StubEngine(64, 10_000, 10_000)
    pool = Pool(engine.num_slots)
    scheduler = Scheduler(engine, pool)
    rng = random.Random(0)
    request = Request(
        [rng.randrange(64) for _ in range(context)],
        ForkProgram([[1] * num_forks], 10),
        SamplingParams(max_tokens=1000),
        decode=text_of,
        end_ids=frozenset(),
        max_positions=engine.max_positions,
    )
    scheduler.submit(request)
    while request.step < 1:
        assert pool.num_slots - pool.num_free_pages == engine.num_rows
        scheduler.step()
    # The forks are made, and nothing was taken for them or fed yet.
    assert len(request.recorder.threads) == 1 + num_forks
    assert engine.num_rows == context == pool.num_slots - pool.num_free_pages
    before = request.recorder.entries_touched
    for number in range(1, 10):
        scheduler.step()
        fed = 1 + num_forks * number
        assert engine.num_rows - context == fed
        assert pool.num_slots - pool.num_free_pages == context + fed
        assert request.recorder.entries_touched - before == num_forks * number
    scheduler.step()
    assert request.is_done
    assert pool.num_free_pages == pool.num_slots


# -- statistics, machine, files ----------------------------------------------------------------


def test_interval_of_a_median() -> None:
    values = [2.0, 1.0, 4.0, 3.0, 50.0, 5.0, 6.0]
    interval = bootstrap_median(values, seed=3)
    assert interval.median == 4.0
    assert 1.0 <= interval.low < 4.0 < interval.high <= 50.0
    assert interval == bootstrap_median(values, seed=3)
    alone = bootstrap_median([2.5], seed=0)
    assert (alone.low, alone.median, alone.high) == (2.5, 2.5, 2.5)


def test_pairs_alternate() -> None:
    ran: list[str] = []
    sides = [lambda: ran.append("a") or 1, lambda: ran.append("b") or 2]
    assert [run_pair(pair, *sides) for pair in range(3)] == [(1, 2)] * 3
    assert "".join(ran) == "abbaab"


def test_weight_bytes_count_a_tied_embedding_once_and_an_untied_one_not() -> None:
    untied = tiny_model("llama")
    table = 96 * 32 * 4
    total = sum(p.numel() for p in untied.parameters()) * 4
    assert weight_bytes(untied) == total - table
    tied = tiny_model("llama", tie_word_embeddings=True)
    assert weight_bytes(tied) == total - table


def test_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_KERNELS", "off")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = describe_machine()
    assert set(facts["features"]) <= set(FEATURES)
    assert facts["kernels"] == {}
    assert (
        facts["environment"].items() >= {"STRETTO_KERNELS": "off", "OMP_NUM_THREADS": "3"}.items()
    )
    assert not [n for n in facts["environment"] if not n.startswith(("STRETTO_", "OMP_"))]
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert facts["versions"]["torch"]
    json.dumps(facts)


def test_a_revision_is_dirty_where_the_code_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert machine._revision(tmp_path) is None
    git("init")
    paths = [tmp_path / p for p in ("src/a.py", "docs/results.md", "benchmarks/results/x/run.json")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text("old")
    git("add", ".")
    git("commit", "-m", "first")
    clean = machine._revision(tmp_path)
    assert clean
    for path in paths[1:]:
        path.write_text("new")
    assert machine._revision(tmp_path) == clean
    paths[0].write_text("new")
    assert machine._revision(tmp_path) == f"{clean}-dirty"


def test_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.bench.machine.BUFFER_BYTES", 2**20)
    assert 0 < read_bandwidth() < math.inf


def test_matmul_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.bench.machine.MATMUL_SIZE", 32)
    for dtype in ("float32", "bfloat16", "int8"):
        assert 0 < matmul_peak(dtype) < math.inf
    assert [matmul_dtype(d) for d in ("float32", "int8")] == ["float32", "bfloat16"]


def test_table_and_rounding() -> None:
    rows = [{"a": 1, "ratio": 1.23456789, "share": None}, {"a": 20, "ratio": 2.0, "share": 0.5}]
    lines = report.format_table(rows).splitlines()
    assert lines == [" a  ratio  share", " 1  1.235      -", "20      2    0.5"]
    assert report.format_table([]) == ""
    assert rounded(rows[0]) == {"a": 1, "ratio": 1.2346, "share": None}


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    report.write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        report.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# -- command line ------------------------------------------------------------------------------


@pytest.fixture
def fake_load(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.bench.source.Source.target", lambda *_, **__: tiny_target)
    monkeypatch.setattr("stretto.bench.machine.BUFFER_BYTES", 2**20)
    monkeypatch.setattr("stretto.bench.machine.MATMUL_SIZE", 32)


def run_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["bench", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.usefixtures("fake_load")
def test_forks_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    arguments = ["forks", "--forks", "1,2", "--tokens", "4", "--pairs", "2", "--out", str(out)]
    rows = run_json(capfd, *arguments)
    assert [(r["forks"], r["tokens"], r["theoretical"]) for r in rows] == [(1, 4, 1.0), (2, 4, 2.0)]
    assert sorted(p.name for p in out.iterdir()) == [
        "pairs.jsonl", "plot.png", "run.json", "summary.csv"
    ]  # fmt: skip
    records = [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()]
    assert len(records) == 2 * 2 * 2
    with (out / "summary.csv").open() as file:
        assert [row["realized"] for row in csv.DictReader(file)] == [
            str(row["realized"]) for row in rows
        ]
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    run = json.loads((out / "run.json").read_text())
    assert run["settings"] == {
        "forks": [1, 2], "tokens": 4, "prompt_tokens": 64, "pairs": 2, "seed": 0
    }  # fmt: skip
    assert {"command", "model", "dtype", "machine", "definitions"} <= set(run)


@pytest.mark.usefixtures("fake_load")
def test_step_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["step", "--rows", "1,2", "--context", "8", "--pairs", "2"]
    result = run_json(capfd, *arguments, "--out", str(tmp_path))
    assert set(result) == {"rows", "machine", "bookkeeping"}
    assert [(r["context"], r["rows"]) for r in result["rows"]] == [(8, 1), (8, 2)]
    assert all(row["bandwidth_share"] > 0 for row in result["rows"])
    assert {(r["context"], r["rows"]) for r in result["bookkeeping"]} == {
        (context, rows) for context in (200, 8000) for rows in (1, 2)
    }
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["bookkeeping"] == result["bookkeeping"]
    assert main(["bench", *arguments]) == 0
    shown = capfd.readouterr().out
    assert "scheduler_share" in shown
    assert "read_bytes_per_s" not in shown  # told once, in words
    assert "entries_per_token" in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["forks", "--forks", "two"], "'two'"),
        (["forks", "--forks", "4,0"], "'4,0'"),
        (["forks", "--forks", ""], "''"),
        (["forks", "--tokens", "0"], "--tokens"),
        (["forks", "--pairs", "-1"], "--pairs"),
        (["forks", "--prompt-tokens", "0"], "--prompt-tokens"),
        (["forks", "--threads", "0"], "--threads"),
        (["forks", "--model", "no-such-model"], "no-such-model"),
        pytest.param(
            ["forks", "--tokens", "1000000000"],
            "8000000065 positions",
            marks=pytest.mark.embedded,
        ),
        (["step", "--context", "1"], "'1'"),
        (["step", "--rows", "1,512"], "512 rows"),
        pytest.param(["step", "--dtype", "float12"], "float12", marks=pytest.mark.embedded),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert named in captured.err


def test_an_unwritable_folder_is_refused_before_anything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    assert main(["bench", "forks", "--out", str(blocker / "sub")]) == 2
    assert "--out" in capfd.readouterr().err
