"""The loop: steps, packs, sums, checkpoints; killed or shared out, it gives the same losses."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_lms import tiny_lm
from train_job import annotated_rows, write_rows

from stretto.errors import InvalidInput, StrettoError
from stretto.train.checkpoints import Checkpoint, Checkpoints
from stretto.train.examples import ExampleMaker
from stretto.train.loop import Journal, Loop, LoopSettings
from stretto.train.objective import Outcome, Tally, Validation
from stretto.train.optimizer import MasterAdamW
from stretto.train.packing import BatchSize, PackedSteps, pack
from stretto.train.schedule import Schedule
from stretto.train.supervised import Supervised
from stretto.train.workers import joined

JOB = Path(__file__).with_name("train_job.py")
TIMES = ("seconds",)

# -- plans -----------------------------------------------------------------------------------------

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths=lengths, capacity=st.integers(1, 100))
def test_packs_hold_each_group_once_and_overflow_only_alone(
    lengths: list[int], capacity: int
) -> None:
    packs = pack(range(len(lengths)), lambda g: lengths[g], capacity)
    assert sorted(g for p in packs for g in p) == list(range(len(lengths)))
    for p in packs:
        assert sum(lengths[g] for g in p) <= capacity or len(p) == 1


@settings(max_examples=50)
@given(lengths=lengths, seed=st.integers(0, 5), groups=st.integers(1, 7))
def test_an_epoch_has_each_group_once_in_steps_of_a_size(
    lengths: list[int], seed: int, groups: int
) -> None:
    steps = PackedSteps(lengths, BatchSize(groups=groups), pack_tokens=64, epochs=2, seed=seed)
    again = PackedSteps(lengths, BatchSize(groups=groups), pack_tokens=64, epochs=2, seed=seed)
    order = [steps.groups(s) for s in range(steps.num_steps)]
    assert order == [again.groups(s) for s in range(again.num_steps)]
    half = steps.num_steps // 2
    for epoch in (order[:half], order[half:]):
        assert sorted(g for step in epoch for g in step) == list(range(len(lengths)))
        assert all(len(step) == groups for step in epoch[:-1])


def test_steps_by_tokens_stay_below_them_and_parts_of_epochs_count() -> None:
    steps = PackedSteps([30] * 10, BatchSize(tokens=70), pack_tokens=30, epochs=1.5, seed=1)
    assert [len(steps.groups(s)) for s in range(steps.num_steps)] == [2] * 5 + [2] * 2
    assert all(len(p) == 1 for p in steps.packs(0))
    short = PackedSteps([30] * 10, BatchSize(tokens=70), pack_tokens=30, epochs=3, max_steps=4)
    assert short.num_steps == 4
    with pytest.raises(InvalidInput, match="nothing to train on"):
        PackedSteps([], BatchSize(groups=1), pack_tokens=1)
    with pytest.raises(InvalidInput, match="give one of the two"):
        BatchSize()


def test_rates_rise_and_fall_to_nothing() -> None:
    linear = Schedule(1.0, "linear", warmup=4)
    assert [linear.lr_at(s, 12) for s in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert [linear.lr_at(s, 12) for s in (4, 8, 12)] == pytest.approx([1.0, 0.5, 0.0])
    assert Schedule(1e-5, "linear").lr_at(0, 100) == 1e-5  # the paper's: no warm-up
    cosine = Schedule(2.0, "cosine")
    assert [cosine.lr_at(s, 8) for s in (0, 4, 8)] == pytest.approx([2.0, 1.0, 0.0])
    assert Schedule(1.0, "constant", warmup=0.5).lr_at(9, 10) == 1.0
    with pytest.raises(InvalidInput, match="lr is 0"):
        Schedule(0.0)


def test_masters_are_torch_adamw_and_bfloat16_weights_follow_them() -> None:
    torch.manual_seed(0)
    own, theirs = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    half = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    mine = MasterAdamW({"a": own, "h": half}, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=1e-4, weight_decay=0.1)
    for step in range(5):
        gradient = torch.randn(3, 2)
        own.grad, theirs.grad = gradient.clone(), gradient / 4
        half.grad = torch.full((3, 2), 2.0, dtype=torch.bfloat16)
        mine.collect()
        mine.normalise(4.0, None)
        mine.update(1e-4, step)
        reference.step()
    assert torch.allclose(own, theirs, atol=1e-7)
    assert torch.equal(half, mine.masters["h"].bfloat16())
    assert float(mine.masters["h"].mean()) < 1.0  # steps too small for bfloat16 still add up


def test_a_restored_optimizer_steps_on_bit_for_bit() -> None:
    """Masters of bfloat16 weights hold what the weights cannot; both moments count."""
    weights = [torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16)) for _ in range(2)]
    first, second = (MasterAdamW({"w": w}) for w in weights)
    gradients = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()

    def step(optimizer: MasterAdamW, number: int) -> None:
        optimizer.parameters["w"].grad = gradients[number].clone()
        optimizer.collect()
        optimizer.normalise(1.0, None)
        optimizer.update(1e-3, number)

    for number in range(3):
        step(first, number)
    second.restore({name: t.clone() for name, t in first.state().items()})
    assert torch.equal(weights[0], weights[1])
    for number in (3, 4):
        step(first, number)
        step(second, number)
    assert torch.equal(weights[0], weights[1])
    for name, tensor in first.state().items():
        assert torch.equal(tensor, second.state()[name]), name
    assert not torch.equal(first.masters["w"], first.masters["w"].bfloat16().float())


def test_gradients_are_clipped_to_a_norm() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    mine = MasterAdamW({"a": parameter})
    parameter.grad = torch.tensor([6.0, 8.0])
    mine.collect()
    assert mine.normalise(2.0, 1.0) == pytest.approx(5.0)
    assert mine.gradients["a"].tolist() == pytest.approx([0.6, 0.8])


# -- runs ------------------------------------------------------------------------------------------


def tiny_run(folder: Path, pack_tokens: int = 200, **changes: Any) -> tuple[Loop, Any]:
    lm = tiny_lm("pasta")
    made = ExampleMaker(lm.vocabulary, lm.card, 512)
    examples = [
        made.from_annotated(lm.encode(lm.chat(r["prompt"])), r["annotated"], r["prompt_id"])
        for r in annotated_rows()
    ]
    steps = PackedSteps(
        [len(e) for e in examples], BatchSize(groups=4), pack_tokens=pack_tokens, epochs=2
    )
    options = {"schedule": Schedule(1e-2), "checkpoint_every": 2, **changes}
    model = copy.deepcopy(lm.model)
    validation = Validation(Supervised(examples), [(0, 1)])
    loop = Loop(
        model, Supervised(examples), steps, LoopSettings(**options), folder, validation=validation
    )
    return loop, model


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def test_how_examples_are_packed_does_not_matter(tmp_path: Path) -> None:
    """Gradients are normalised over the whole step, however many sequences it takes."""
    runs = []
    for name, pack_tokens in (("alone", 1), ("some", 200), ("all", 4000)):
        loop, model = tiny_run(tmp_path / name, pack_tokens)
        loop.run()
        runs.append((lines_of(tmp_path / name), dict(model.named_parameters())))
    packs = [lines[1]["num_packs"] for lines, _ in runs]
    assert packs[0] == 4 > packs[1] > packs[2] == 1
    for lines, parameters in runs[1:]:
        for line, own in zip(lines, runs[0][0], strict=True):
            assert line["loss"] == pytest.approx(own["loss"], rel=1e-4)
            assert line["num_terms"] == own["num_terms"]
        for name, parameter in parameters.items():
            assert torch.allclose(parameter, runs[0][1][name], atol=5e-3), name


def test_it_learns_and_splits_the_loss(tmp_path: Path) -> None:
    loop, _ = tiny_run(tmp_path)
    finished = loop.run()
    lines = lines_of(tmp_path)
    valid = [line for line in lines if line["kind"] == "valid"]
    assert valid[0]["step"] == 0
    assert valid[-1]["loss"] < valid[0]["loss"]
    parts = ("content", "promise", "length", "sync", "close", "end")
    assert all(f"loss_{part}" in valid[-1] for part in parts)
    assert finished.is_complete
    assert finished.valid == {k: v for k, v in valid[-1].items() if k not in ("kind", "step")}


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole, model = tiny_run(tmp_path / "whole")
    whole.run()
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 4

    first, _ = tiny_run(tmp_path / "parts")
    first._should_stop = stop
    finished = first.run()
    assert (finished.num_steps, finished.is_complete) == (3, False)
    second, other = tiny_run(tmp_path / "parts")
    assert second.run().is_complete
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    third, _ = tiny_run(tmp_path / "parts")
    assert third.run().is_complete
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")


def test_a_run_stopped_before_it_began_begins_anew(tmp_path: Path) -> None:
    tiny_run(tmp_path / "whole")[0].run()
    first, _ = tiny_run(tmp_path / "parts")
    first._should_stop = lambda: True
    assert first.run().num_steps == 0
    assert not (tmp_path / "parts" / "checkpoints").exists()
    tiny_run(tmp_path / "parts")[0].run()
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")


class Noisy:
    """An objective that draws random numbers where it makes a batch, as denoising does."""

    def __init__(self, inner: Supervised) -> None:
        self.inner = inner

    def batch(self, pack: Any) -> Any:
        return Noise(self.inner.batch(pack), float(torch.rand(())))

    def outcome(self, model: Any, batch: Any) -> Outcome:
        plain = self.inner.outcome(model, batch.inner)
        return Outcome(plain.loss * batch.weight, plain.num_terms)


@dataclass(frozen=True)
class Noise:
    inner: Any
    weight: float

    def to(self, device: Any) -> Noise:
        return self


def test_what_an_objective_draws_is_drawn_again_by_a_resumed_run(tmp_path: Path) -> None:
    def run(folder: Path, stop_at: int | None = None) -> None:
        loop, _ = tiny_run(folder)
        loop._objective = Noisy(loop._objective)  # type: ignore[arg-type]
        loop._validation = None
        asked = iter(range(99))
        loop._should_stop = lambda: next(asked) == stop_at
        loop.run()

    run(tmp_path / "whole")
    torch.rand(7)  # another state than before
    run(tmp_path / "parts", stop_at=3)
    run(tmp_path / "parts")
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    losses = [line["loss"] for line in lines_of(tmp_path / "whole")]
    assert len(set(losses)) == len(losses)


def test_torchs_own_random_state_is_as_it_was(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    tiny_run(tmp_path)[0].run()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
    ],
)
def test_numbers_that_would_undo_training_are_refused(
    changes: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        LoopSettings(Schedule(1.0), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("epochs", [0.0, float("inf"), float("nan")])
def test_epochs_are_a_number_above_zero(epochs: float) -> None:
    with pytest.raises(InvalidInput, match="epochs is"):
        PackedSteps([1], BatchSize(groups=1), pack_tokens=1, epochs=epochs)


def test_other_settings_or_weights_do_not_go_on(tmp_path: Path) -> None:
    tiny_run(tmp_path)[0].run()
    with pytest.raises(InvalidInput, match="other settings or data"):
        tiny_run(tmp_path, fingerprint="another")[0].run()
    kept = Checkpoints(tmp_path / "checkpoints")
    last = kept.latest()
    assert last is not None
    first = next(iter(last.tensors))
    kept.save(Checkpoint(last.step, {first: last.tensors[first]}, last.facts))
    with pytest.raises(InvalidInput, match="another model"):
        tiny_run(tmp_path)[0].run()


def test_checkpoints_are_whole_few_and_named_when_damaged(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    assert kept.latest() is None
    for step in (1, 2, 3):
        kept.save(Checkpoint(step, {"a": torch.full((2,), float(step))}, {"x": step}))
    (tmp_path / ".step-00000004.abcd.tmp").mkdir()  # what a kill leaves
    found = kept.latest()
    assert found is not None
    assert (found.step, found.facts["x"], found.tensors["a"].tolist()) == (3, 3, [3.0, 3.0])
    kept.save(Checkpoint(5, {"a": torch.zeros(1)}, {}))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["step-00000003", "step-00000005"]
    (tmp_path / "step-00000005" / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidInput, match="damaged"):
        kept.latest()


def test_a_kill_while_a_checkpoint_is_replaced_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is moved aside is no checkpoint any more, however much of it is left."""
    kept = Checkpoints(tmp_path)
    for step in (1, 2):
        kept.save(Checkpoint(step, {"a": torch.full((2,), float(step))}, {}))

    def killed(path: Path, **_: Any) -> None:
        for file in path.glob("*.safetensors"):
            file.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        kept.save(Checkpoint(2, {"a": torch.zeros(2)}, {}))
    found = kept.latest()
    assert found is not None
    assert (found.step, found.tensors["a"].tolist()) == (2, [0.0, 0.0])


def test_a_full_disk_is_told_in_one_line_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Checkpoints(tmp_path)
    kept.save(Checkpoint(1, {"a": torch.ones(2)}, {}))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StrettoError, match=r"cannot write checkpoint .*No space left.*make room"):
        kept.save(Checkpoint(2, {"a": torch.zeros(2)}, {}))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_torn_line_of_metrics_is_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "m.jsonl", writes=True)
    for step in (1, 2, 3):
        journal.add({"kind": "train", "step": step, "loss": 0.5})
    with (tmp_path / "m.jsonl").open("ab") as file:
        file.write(b'{"kind": "train", "st')
    journal.cut(2)
    assert [line["step"] for line in lines_of_file(tmp_path / "m.jsonl")] == [1, 2]
    assert journal.last("train") == {"step": 2, "loss": 0.5}


def lines_of_file(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Exploding:
    """An objective whose loss is no number."""

    def __init__(self, inner: Supervised) -> None:
        self.inner = inner

    def batch(self, pack: Any) -> Any:
        return self.inner.batch(pack)

    def outcome(self, model: Any, batch: Any) -> Outcome:
        good = self.inner.outcome(model, batch)
        return Outcome(good.loss * torch.nan, good.num_terms)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    loop, model = tiny_run(tmp_path)
    loop._objective = Exploding(loop._objective)  # type: ignore[arg-type]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StrettoError, match="loss of step 1 is nan"):
        loop.run()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_row_without_targets_is_an_error_not_a_zero_loss() -> None:
    lm = tiny_lm("pasta")
    made = ExampleMaker(lm.vocabulary, lm.card, 512)
    examples = [made.from_annotated([1, 2, 3], "text", key=name) for name in ("good", "empty")]
    examples[1].targets.fill_(-100)
    objective = Supervised(examples)
    with pytest.raises(InvalidInput, match="row 'empty' has no token to learn from"):
        objective.outcome(lm.model, objective.batch((0, 1)))


def test_tallies_weigh_what_they_add() -> None:
    tally = Tally()
    for loss, terms, share in ((6.0, 2.0, (3.0, 1.0)), (2.0, 2.0, (1.0, 3.0))):
        tally.add(Outcome(torch.tensor(loss), terms, {"a": share, "none": (0.0, 0.0)}))
    assert tally.report() == {"loss": 2.0, "num_terms": 4.0, "a": 1.0}


def test_a_model_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    lm = tiny_lm("pasta")
    lm.model.requires_grad_(False)
    steps = PackedSteps([1], BatchSize(groups=1), pack_tokens=1)
    with pytest.raises(InvalidInput, match="no parameter to train"):
        Loop(lm.model, Supervised([]), steps, LoopSettings(Schedule(1.0)), tmp_path)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_processes_speak_as_their_device_does(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    """Also where there are GPUs that a run on the CPU does not use."""
    asked: list[Any] = []
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", asked.append)
    monkeypatch.setattr("torch.distributed.init_process_group", asked.append)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    with joined(device) as workers:
        assert (workers.rank, workers.count) == (1, 2)
    assert asked == ([backend] if device == "cpu" else [1, backend])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Settings of a tiny run with dropout, and what it gives when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("job")
    tiny_lm("plain").save(folder / "base")
    data = write_rows(folder / "rows.jsonl", annotated_rows())
    settings = {
        "model": str(folder / "base"), "data": [str(data)], "dtype": "float32", "dropout": 0.1,
        "epochs": 4, "batch": 4, "pack_tokens": 128, "lr": 1e-2, "checkpoint_every": 1,
        "valid_share": 0.2, "valid_every": 3,
    }  # fmt: skip
    run_job({**settings, "out": str(folder / "whole")})
    return {**settings, "whole": folder / "whole"}


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def run_job(settings: Mapping[str, Any], *launcher: str) -> None:
    command = [sys.executable, *launcher, str(JOB), json.dumps(settings)]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=200)


def settings_of(job: Mapping[str, Any], out: Path) -> dict[str, Any]:
    return {**{k: v for k, v in job.items() if k != "whole"}, "out": str(out)}


def test_kill_9_and_the_same_command_gives_the_same_run(
    job: Mapping[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, str(JOB), json.dumps(settings_of(job, out))]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    for _ in watching(process):
        metrics = out / "metrics.jsonl"
        if metrics.exists() and metrics.read_bytes().count(b'"train"') >= 3:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert not (out / "model").exists()
    run_job(settings_of(job, out))
    assert lines_of(out) == lines_of(job["whole"])
    for name in ("adapter_model.safetensors", "adapter_config.json", "stretto.json", "base.json"):
        assert (out / "model" / name).read_bytes() == (job["whole"] / "model" / name).read_bytes()


def watching(process: subprocess.Popen[bytes]) -> Iterator[None]:
    for _ in range(20000):
        if process.poll() is not None:
            return
        yield
        time.sleep(0.005)


def test_two_processes_give_the_losses_of_one(job: Mapping[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "two"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_job({**settings_of(job, out)}, *launcher)
    whole, shared = lines_of(job["whole"]), lines_of(out)
    assert [line.get("tokens") for line in shared] == [line.get("tokens") for line in whole]
    assert [line["kind"] for line in shared] == [line["kind"] for line in whole]
    assert max(line.get("num_packs", 1) for line in shared) > 1
    for line, own in zip(shared, whole, strict=True):
        assert line["num_terms"] == own["num_terms"]
        assert line["loss"] == pytest.approx(own["loss"], rel=1e-4)
