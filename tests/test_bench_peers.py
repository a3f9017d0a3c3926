"""`stretto bench peers`: all sides compute the same weights; times are only there."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model

from stretto.bench import lineup as peer_lineup
from stretto.bench import pairs, peer_forks, peers
from stretto.bench.gguf_file import (
    FILE,
    PRECISIONS,
    cached_gguf,
    check_writable,
    weights_digest,
    write_gguf,
)
from stretto.bench.journal import Journal
from stretto.bench.lineup import Lineup, chosen_kinds, statuses
from stretto.bench.peer_transformers import TransformersSide
from stretto.bench.program import Target
from stretto.bench.sides import Decoded, OwnSide, Task, opened
from stretto.bench.source import (
    RANDOM_SHAPE,
    TEXT,
    Source,
    prompt_of,
    random_model,
    starts_of,
    text_of,
)
from stretto.cli import bench_parts, main
from stretto.engines.hf import HFEngine
from stretto.errors import InvalidInput, StrettoError, UnknownName, Unsupported
from stretto.models import gguf as reading

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
TASK = Task(list(range(3, 40)), [[5, 60, 61]] * 2 + [[70]], 6)


def small_model(kind: str = "llama", **changes: Any) -> Any:
    return tiny_model(kind, **{**SMALL, **changes})


def small_target(dtype: str = "float32", slots: int = 512) -> Target:
    model = random_model(1, dtype, **SMALL)
    return Target.over(HFEngine(model, slots), range(96), text_of, "small", model)


def silent(line: str) -> None:
    pass


def unseen(task: str, done: int, total: int) -> None:
    pass


def runs(side: Any, task: Task = TASK) -> list[Decoded]:
    with opened(side, task):
        return [side.run() for _ in task.bursts]


# -- sides -------------------------------------------------------------------------------------


def test_stretto_and_transformers_decode_the_same() -> None:
    target = small_target()
    ours, theirs = (
        runs(OwnSide(target)),
        runs(TransformersSide(random_model(1, "float32", **SMALL))),
    )
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(a.first_logits - b.first_logits).max() < 1e-4
        assert peers.agreement(a.tokens, b.tokens, 6) == 6
        assert a.seconds > 0
        assert b.seconds > 0
    assert ours[0].tokens == ours[1].tokens
    assert [len(r.tokens) for r in ours] == [3, 3, 1]
    assert {len(t) for r in theirs for t in r.tokens} == {TASK.num_steps + 1}


def test_our_side_computes_the_prefix_once_and_frees_each_burst() -> None:
    side = OwnSide(small_target())
    with opened(side, TASK):
        for _ in TASK.bursts:
            side.run()
        assert side.peak_slots <= TASK.num_slots
        assert side.peak_slots >= len(TASK.prompt) + 3 * (TASK.num_steps + 1)
        scheduler = side._scheduler
    assert scheduler.pool.num_free_pages == scheduler.pool.num_pages
    with pytest.raises(InvalidInput, match=r"61 KV slots .* 40"):
        OwnSide(small_target(slots=40)).open(TASK)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_computes_the_same_weights(kind: str, precision: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from stretto.bench.peer_llama import LlamaSide, system_info

    model = small_model(kind)
    reference = runs(TransformersSide(model))
    write_gguf(model, tmp_path / FILE, precision)
    side = LlamaSide(tmp_path / FILE, precision, 1)
    try:
        found = runs(side)
        assert side.sequential(TASK.prompt, 5) > 0
        again = runs(side)
    finally:
        side.free()
    limit = {"BF16": 0.05, "Q8_0": 0.15, "Q4_0": 1.0}[precision]
    for a, b, c in zip(found, reference, again, strict=True):
        assert peers.logit_error(a.first_logits, b.first_logits) < limit
        assert a.tokens == c.tokens
        assert {len(t) for t in a.tokens} == {TASK.num_steps + 1}
    assert found[0].tokens[0] == found[1].tokens[0]
    (told,) = (s for s in statuses(chosen_kinds(["llama.cpp"])) if s["name"] == "llama.cpp")
    assert told["built_for"] == system_info()
    assert "=" in system_info()


# -- GGUF files --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_what_is_written_reads_back_as_the_weights(kind: str, tied: bool, tmp_path: Path) -> None:
    import gguf

    model = small_model(kind, tie_word_embeddings=tied)
    path = tmp_path / FILE
    write_gguf(model, path, "BF16")
    fields, tensors = reading._read(path)
    assert fields["general.architecture"] == kind
    assert fields[f"{kind}.attention.head_count_kv"] == 2
    assert fields[f"{kind}.vocab_size"] == 96
    read = {}
    for tensor in tensors:
        name = reading._hf_name(path, tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        read[name] = torch.from_numpy(reading._undo_interleaving(values, name, model.config).copy())
    wanted = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    assert read.keys() == wanted.keys()
    for name, tensor in wanted.items():
        exact = tensor.bfloat16().float() if tensor.ndim > 1 else tensor
        assert torch.equal(read[name], exact), name


def test_quantised_files_are_near_the_weights(tmp_path: Path) -> None:
    import gguf

    model = small_model()
    for precision, limit in (("Q8_0", 0.01), ("Q4_0", 0.15)):
        path = tmp_path / f"{precision}.gguf"
        write_gguf(model, path, precision)
        reader = gguf.GGUFReader(path)
        table = next(t for t in reader.tensors if t.name == "token_embd.weight")
        assert table.tensor_type.name == precision
        exact = model.get_input_embeddings().weight.detach().numpy()
        error = gguf.dequantize(table.data, table.tensor_type) - exact
        assert np.linalg.norm(error) < limit * np.linalg.norm(exact)
        norm = next(t for t in reader.tensors if t.name == "output_norm.weight")
        assert norm.tensor_type.name == "F32"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"layer_types": ["sliding_attention"]}, "sliding"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_what_would_be_written_wrongly_is_refused(change: dict[str, Any], named: str) -> None:
    import copy

    config = copy.deepcopy(small_model().config)
    check_writable(config)
    for name, value in change.items():
        if name == "model_type":
            config.__class__ = type("Odd", (type(config),), {"model_type": value})
        else:
            object.__setattr__(config, name, value)
    with pytest.raises(Unsupported, match=named):
        check_writable(config)


def test_files_are_kept_by_weights_and_written_anew_if_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    model = small_model()
    digest = weights_digest(model)
    assert digest == weights_digest(model)
    assert digest != weights_digest(random_model(2, "float32", **SMALL))
    told: list[str] = []
    path = cached_gguf(model, "Q8_0", digest, lambda task, done, total: told.append(task))
    good = path.read_bytes()
    assert cached_gguf(model, "Q8_0", digest, unseen) == path
    assert told
    path.write_bytes(good[:-1] + b"x")
    assert cached_gguf(model, "Q8_0", digest, unseen).read_bytes() == good
    assert [p.name for p in path.parent.parent.iterdir() if ".tmp" in p.name] == []


# -- weights and prompts -----------------------------------------------------------------------


def test_random_weights_are_of_the_shape_and_of_the_seed() -> None:
    model = random_model(3, "auto", num_hidden_layers=1, vocab_size=64)
    assert model.dtype == torch.bfloat16
    layer = 896 * 64 * (14 + 2 + 2 + 14) + 3 * 896 * 4864 + 2 * 896
    assert sum(p.numel() for p in model.parameters()) == layer + 64 * 896 + 896
    whole = 24 * layer + RANDOM_SHAPE["vocab_size"] * 896 + 896
    assert whole == 494_005_120
    small = [random_model(s, d, **SMALL) for s, d in ((3, "bfloat16"), (3, "float32"), (4, "auto"))]
    first, wide, other = (m.model.layers[1].mlp.up_proj.weight for m in small)
    assert torch.equal(first.float(), wide)
    assert not torch.equal(first, other)
    with pytest.raises(UnknownName, match="float23"):
        random_model(0, "float23", **SMALL)


def test_prompts_and_starts() -> None:
    target = small_target()
    assert prompt_of(target, 20, 1) == prompt_of(target, 20, 1) != prompt_of(target, 20, 2)
    prompt = prompt_of(target, 9, 0)
    for num_rows in (1, 5, 64):
        starts = starts_of(target, prompt, num_rows, 0)
        assert len(set(starts)) == num_rows
    assert set(starts_of(target, prompt, 2, 0)) <= set(prompt)
    import dataclasses

    reads = dataclasses.replace(target, encode=lambda text: [ord(c) % 96 for c in text])
    for length in (3, len(TEXT), 2000):
        found = prompt_of(reads, length, 0)
        assert len(found) == length
        assert found[:3] == [ord(c) % 96 for c in TEXT[:3]]


# -- pairs -------------------------------------------------------------------------------------


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Source:
    monkeypatch.setattr(pairs, "PAUSE_S", 0.0)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Source, "hf_model", lambda _, dtype: random_model(1, dtype, **SMALL))
    monkeypatch.setattr(
        Source, "target", lambda self, **k: small_target(k["dtype"].replace("auto", "bfloat16"))
    )
    return Source()


PLAN = peers.Plan(rows=[1, 2], contexts=[12], steps=3, pairs=2, forks=2, fork_tokens=4, seed=0)


def test_rows_of_peers_and_a_run_goes_on_where_it_was(small_source: Source, tmp_path: Path) -> None:
    targets = [small_target("bfloat16"), small_target("float32")]
    lineup = Lineup(small_source, chosen_kinds(["transformers"]), 1, silent)
    journal = Journal(tmp_path, {"a": 1}, silent, revision="abc")
    rows, records = peers.measure(targets, lineup, PLAN, journal, silent)
    assert [(r["rows"], r["peer"], r["ours"]) for r in rows[:3]] == [
        (1, "transformers bfloat16", "stretto hf bfloat16"),
        (1, "transformers bfloat16", "stretto hf float32"),
        (1, "transformers float32", "stretto hf bfloat16"),
    ]
    assert len(rows) == 2 * 2 * 2
    assert len(records) == 8 * 2
    for row in rows:
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert row["pairs"] == 2
        assert row["ours_step_ms"] == pytest.approx(
            1000 * row["rows"] / row["ours_tokens_per_s"], rel=1e-3
        )
    exact = [r for r in rows if "float32" in r["ours"] and "float32" in r["peer"]]
    assert all(r["ours_logit_error"] < 1e-4 and r["agree_tokens"] == 3 for r in exact)
    resumed = Journal(tmp_path, {"a": 1}, silent, revision="abc")
    assert peers.measure(targets, lineup, PLAN, resumed, silent) == (rows, records)
    # Without llama.cpp there is nothing to be sequential against.
    assert peer_forks.measure(targets, lineup, PLAN, resumed, silent) == ([], [])


def test_forks_end_to_end(small_source: Source) -> None:
    pytest.importorskip("llama_cpp")
    lineup = Lineup(small_source, chosen_kinds(["llama.cpp"]), 1, silent)
    journal = Journal(None, {}, silent, revision="abc")
    rows, records = peer_forks.measure([small_target()], lineup, PLAN, journal, silent)
    assert [row["peer"].split()[-1] for row in rows] == list(PRECISIONS)
    assert sum(row["fastest"] for row in rows) == 1
    for row in rows:
        assert row["forks_ratio"] > 0
        assert (row["forks"], row["tokens"], row["pairs"]) == (2, 4, 2)
    assert len(records) == 3 * 2


def test_a_side_that_computes_something_else_is_refused(
    small_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineup = Lineup(small_source, chosen_kinds(["transformers"]), 1, silent)
    ran: list[Any] = []

    def run(side: Any) -> Decoded:
        ran.append(side)
        return right(side)

    right = TransformersSide.run
    wrong = TransformersSide(random_model(9, "float32", **SMALL))
    monkeypatch.setattr(TransformersSide, "run", run)
    monkeypatch.setattr(lineup, "side", lambda name: wrong)
    journal = Journal(None, {}, silent, revision="abc")
    with pytest.raises(StrettoError, match="does not compute these weights"):
        peers.measure([small_target()], lineup, PLAN, journal, silent)
    assert ran.count(wrong) == 1  # the warm-up, and nothing that is timed


def test_a_prompt_that_ends_in_an_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(scheduler: Any) -> bool:
        for request in scheduler.waiting:
            request.abort(StrettoError("no luck"))
        return False

    monkeypatch.setattr("stretto.runtime.scheduler.Scheduler.step", end)
    with pytest.raises(StrettoError, match="prompt of 37 tokens ended with 'no luck'"):
        OwnSide(small_target()).open(TASK)


def test_nothing_is_new_to_llama_cpp_when_its_clock_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp")
    from stretto.bench import peer_llama

    write_gguf(small_model(), tmp_path / FILE, "BF16")
    side, done = peer_llama.LlamaSide(tmp_path / FILE, "BF16", 1), []
    decode, clear = side._decode, side._c.llama_memory_clear
    monkeypatch.setattr(
        side, "_decode", lambda ids, *a, **k: done.append(len(ids)) or decode(ids, *a, **k)
    )
    monkeypatch.setattr(
        side._c,
        "llama_memory_clear",
        lambda m, data: done.append(f"clear {data}") or clear(m, data),
    )
    clock = peer_llama.time.perf_counter
    monkeypatch.setattr(peer_llama.time, "perf_counter", lambda: done.append("clock") or clock())
    try:
        side.sequential(TASK.prompt, 3)
    finally:
        side.free()
    assert done == [1, "clear True", "clock", len(TASK.prompt), 1, 1, "clock"]


def test_agreement_and_error() -> None:
    assert peers.agreement([[1, 2, 3], [1, 2, 3]], [[1, 2, 4], [0, 2, 3]], 3) == 1
    assert peers.agreement([[1, 2, 3, 4]], [[1, 2, 3, 5]], 3) == 3
    reference = np.array([[1.0, 3.0]], dtype=np.float32)
    assert peers.logit_error(reference + 1, reference) == pytest.approx(1)


def test_kinds_that_are_not_there_are_named_with_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_lineup, "find_spec", lambda module: None if module == "vllm" else True)
    found = statuses(chosen_kinds(["transformers"]))
    told = {s["name"]: s["status"] for s in found}
    assert [s["built_for"] for s in found] == [None] * 5
    assert told["vllm"] == "not installed; pip install vllm"
    assert told["transformers"] == "measured"
    assert told["llama.cpp"] == "left out"
    assert told["openvino"] == "installed, but there is no side for it"
    with pytest.raises(InvalidInput, match="pip install vllm"):
        chosen_kinds(["vllm"])
    with pytest.raises(UnknownName, match=r"llama\.cpp"):
        chosen_kinds(["lama.cpp"])


@pytest.mark.usefixtures("small_source")
def test_peers_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "peers", "--peers", "transformers", "--rows", "1,2", "--context", "8"]
    arguments += ["--tokens", "2", "--pairs", "2", "--dtype", "bfloat16,float32", "--threads", "1"]
    assert main([*arguments, "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert set(result) == {"rows", "forks", "peers", "machine"}
    assert len(result["rows"]) == 8
    assert next(p for p in result["peers"] if p["name"] == "transformers")["version"]
    with (tmp_path / "summary.csv").open() as file:
        assert [r["ratio"] for r in csv.DictReader(file)] == [
            str(r["ratio"]) for r in result["rows"]
        ]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["benchmark"] == "peers"
    assert run["settings"]["threads"] == 1
    assert not (tmp_path / "cells.jsonl").exists()
    assert main(arguments) == 0
    assert "vllm: not installed; pip install vllm" in capfd.readouterr().out


@pytest.mark.usefixtures("small_source")
def test_one_dtype_by_two_names_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "peers", "--peers", "transformers", "--dtype", "auto,bfloat16"]
    assert main(arguments) == 2
    assert "bfloat16, bfloat16" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--peers", "llama"], "llama"),
        (["--peers", ""], "--peers"),
        (["--forks", "-1"], "--forks"),
        (["--fork-tokens", "0"], "--fork-tokens"),
        (["--tokens", "0"], "--tokens"),
        (["--rows", "x"], "'x'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert named in captured.err


# -- going on after a kill ---------------------------------------------------------------------


def test_a_journal_keeps_whole_cells_of_the_same_heading(tmp_path: Path) -> None:
    heading = {"settings": {"rows": [1, 2]}, "revision": "abc"}
    journal = Journal(tmp_path, heading, silent, revision="abc")
    assert journal.cell("a", lambda: {"row": 1}) == {"row": 1}
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": "b", "ce')
    again = Journal(tmp_path, heading, silent, revision="abc")
    assert again.cell("a", lambda: pytest.fail("measured again")) == {"row": 1}
    assert again.cell("b", lambda: {"row": 2}) == {"row": 2}
    assert Journal(tmp_path, heading, silent, revision="abc").cell("b", dict) == {"row": 2}
    other = Journal(tmp_path, heading | {"revision": "abd"}, silent, revision="abd")
    assert other.cell("a", lambda: {"row": 3}) == {"row": 3}
    other.finish()
    assert list(tmp_path.iterdir()) == []
    nowhere = Journal(None, heading, silent, revision="abc")
    assert nowhere.cell("a", lambda: {"row": 4}) == {"row": 4}
    nowhere.finish()


@pytest.mark.parametrize("revision", ["abc-dirty", None])
def test_cells_of_code_that_has_no_name_are_not_gone_on_from(
    revision: str | None, tmp_path: Path
) -> None:
    told: list[str] = []
    first = Journal(tmp_path, {"a": 1}, told.append, revision=revision)
    assert first.cell("a", lambda: {"row": 1}) == {"row": 1}
    again = Journal(tmp_path, {"a": 1}, told.append, revision=revision)
    assert again.cell("a", lambda: {"row": 2}) == {"row": 2}
    assert len(told) == 2
    assert all(f"the revision is {revision or 'unknown'}" in line for line in told)


def test_cells_of_another_engine_or_environment_are_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    monkeypatch.setattr("stretto.bench.machine._revision", lambda: "abc")
    place = bench_parts.Place.of("small", False, 0, dtype="auto", engine="auto")

    def journal(target: Target) -> Journal:
        return bench_parts.start_journal(tmp_path, "peers", place, {}, [target])

    target = small_target()
    journal(target).cell("a", lambda: {"row": 1})
    assert "a" in journal(target)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "a" not in journal(target)
    journal(target).cell("a", lambda: {"row": 1})
    assert "a" not in journal(dataclasses.replace(target, dtype="bfloat16"))
    journal(target).cell("a", lambda: {"row": 1})
    other = HFEngine(random_model(1, "float32", **SMALL), 8)
    other.name = "other"
    assert "a" not in journal(dataclasses.replace(target, engine=other))
