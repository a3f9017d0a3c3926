"""`stretto train grpo`: whole runs, killed and gone on with, validated, refused, estimated."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from grpo_kit import forgetful_lm, write_problems
from tiny_lms import tiny_tokenizer

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.data.rows import read_rows
from stretto.errors import InvalidInput, UnknownName, Unsupported
from stretto.eval.task_boxed import boxed, last_boxed
from stretto.eval.tasks import Item, Source
from stretto.train.grpo_config import GrpoConfig
from stretto.train.grpo_problems import exact, load_problems
from stretto.train.grpo_rollouts import Rollout
from stretto.train.grpo_run import train_grpo
from stretto.train.grpo_valid import best_step

RECIPE = Path(__file__).parents[1] / "recipes" / "grpo" / "qwen3-4b-tip.toml"
TIMES = ("seconds", "sample_seconds", "sample_tokens_per_s")
SETTINGS = (
    "--steps", "4", "--prompts-per-step", "3", "--samples", "3", "--max-tokens", "30",
    "--kv-weight", "0.5", "--lr", "1e-3", "--full", "--dtype", "float32", "--engine", "hf",
    "--inner", "2", "--beta", "0.01", "--checkpoint-every", "2", "--valid-every", "2",
    "--pack-tokens", "256",
)  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def invoke(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["train", "grpo", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and problems."""
    folder = tmp_path_factory.mktemp("given")
    forgetful_lm(head_dim=16).save(folder / "model")
    write_problems(folder / "problems.jsonl")
    write_problems(folder / "valid.jsonl", 3, first=50)
    return folder


def flags(given: Path, out: Path, *more: str) -> list[str]:
    files = ["--prompts", str(given / "problems.jsonl"), "--valid", str(given / "valid.jsonl")]
    return ["--model", str(given / "model"), *files, "--out", str(out), *SETTINGS, *more]


@pytest.fixture(scope="module")
def whole(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(["train", "grpo", *flags(given, out), "-q"]) == 0
    return out


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_leaves_a_model_and_says_what_each_step_came_to(given: Path, whole: Path) -> None:
    steps = [line for line in lines_of(whole) if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, 9))
    names = (
        "reward", "accuracy", "live", "live_peak", "length", "control", "truncated", "no_signal",
        "entropy", "unusable", "clipped", "kl", "kl_old", "ratio_gap", "loss", "grad_norm",
    )  # fmt: skip
    for line in steps:
        assert set(names) <= set(line)
        first_time_through = line["step"] % 2 == 1
        assert (line["ratio_gap"] < 1e-3) == first_time_through
    assert steps[0]["kl"] < 1e-6 < steps[-1]["kl"]
    assert any(0 < line["accuracy"] < 1 for line in steps)
    assert any(line["grad_norm"] > 0 for line in steps)
    timed = json.loads((whole / "metrics.jsonl").read_text().splitlines()[1])
    assert timed["sample_tokens_per_s"] > 0
    start, end = tensors_of(given / "model"), tensors_of(whole / "model")
    assert any(not torch.equal(start[name], end[name]) for name in start)
    lm = LM.load(whole / "model", engine="hf", dtype="float32")
    assert lm.card.dialect == "tip"
    assert lm.generate("say 1", SamplingParams(max_tokens=8))[0].text is not None


def test_each_rollout_is_kept_once(whole: Path) -> None:
    files = sorted((whole / "rollouts").glob("*.jsonl"))
    assert [path.name for path in files] == [f"step-0000000{k}.jsonl" for k in (1, 2, 3, 4)]
    for path in files:
        rows = read_rows(path, Rollout)
        assert len({row.key for row in rows}) == len(rows) == 9
        assert all(row.prompt is None for row in rows)


def test_validation_is_greedy_on_what_is_not_trained_on_and_picks_the_best(whole: Path) -> None:
    valid = [line for line in lines_of(whole) if line["kind"] == "valid"]
    assert [line["step"] for line in valid] == [0, 4, 8]
    for line in valid:
        rows = read_rows(whole / "valid" / f"step-{line['step']:08d}.jsonl", Rollout)
        assert line["accuracy"] == pytest.approx(sum(r.score for r in rows) / 3)
        assert line["live"] == pytest.approx(sum(r.live_mean for r in rows) / 3)
    summary = json.loads((whole / "summary.json").read_text())
    best = best_step(lines_of(whole), tolerance=0.01, by_kv=True)
    assert summary["best_step"] == best
    assert [path.name for path in whole.glob("best-*")] == [f"best-{best:08d}"]
    assert Path(summary["best"]).is_dir()
    if best == 8:
        ours, last = tensors_of(Path(summary["best"])), tensors_of(whole / "model")
        assert all(torch.equal(ours[name], last[name]) for name in last)


def test_the_best_step_is_chosen_by_validation_alone() -> None:
    def line(step: int, accuracy: float, live: float) -> dict[str, Any]:
        return {"kind": "valid", "step": step, "accuracy": accuracy, "live": live}

    lines = [
        line(0, 0.90, 50), {"kind": "train", "step": 1, "accuracy": 1.0, "live": 1},
        line(2, 0.895, 30), line(4, 0.85, 10), line(6, 0.95, 40), line(8, 0.95, 35),
    ]  # fmt: skip
    by_kv = [best_step(lines[:n], tolerance=0.01, by_kv=True) for n in range(1, 7)]
    assert by_kv == [0, 0, 2, 2, 6, 8]
    assert best_step(lines, tolerance=0.01, by_kv=False) == 6
    assert best_step(lines[:1], tolerance=0.0, by_kv=True) == 0
    assert best_step([], tolerance=0.0, by_kv=True) is None


def test_the_same_command_has_nothing_left_to_do(given: Path, whole: Path, run: Run) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*.jsonl")}
    code, out, _ = run(*flags(given, whole), "-q", "--json")
    assert code == 0
    assert json.loads(out)["model"] == str(whole / "model")
    assert {path: path.read_bytes() for path in whole.rglob("*.jsonl")} == before


# -- kills -----------------------------------------------------------------------------------------


def kill_when(arguments: list[str], ready: Callable[[], bool]) -> None:
    command = [sys.executable, "-m", "stretto", "train", "grpo", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    for _ in range(60000):
        if process.poll() is not None:
            raise AssertionError("it ended before it was to be killed")
        if ready():
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kill_9_while_it_draws_and_the_same_command_gives_the_same_run(
    given: Path, whole: Path, tmp_path: Path
) -> None:
    """Killed among the answers of the last step, beyond the last checkpoint: nothing that it had
    drawn is drawn again, and it goes on to the same model."""
    out, last = tmp_path / "out", "step-00000004.jsonl"
    arguments = flags(given, out, "-q")
    kill_when(arguments, lambda: num_lines(out / "rollouts" / last) >= 3)
    assert not (out / "model").exists()
    assert (out / "checkpoints" / "step-00000004").exists()
    before = {path: path.read_bytes() for path in (out / "rollouts").glob("*.jsonl")}
    assert main(["train", "grpo", *arguments]) == 0
    for path, data in before.items():
        whole_rows = data[: data.rfind(b"\n") + 1]
        assert path.read_bytes().startswith(whole_rows)
        rows, others = (
            {r.key: r.ids for r in read_rows(place, Rollout)}
            for place in (path, whole / "rollouts" / path.name)
        )
        assert rows == others
    ours, theirs = lines_of(out), lines_of(whole)
    for one, other in zip(ours, theirs, strict=True):
        assert one.pop("kind") == other.pop("kind")
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    killed, undisturbed = tensors_of(out / "model"), tensors_of(whole / "model")
    for name, tensor in undisturbed.items():
        assert torch.allclose(killed[name], tensor, atol=1e-4), name


def test_ctrl_c_while_it_draws_keeps_what_is_done(given: Path, tmp_path: Path) -> None:
    from stretto.train.grpo_run import GrpoHooks

    config = GrpoConfig(
        model=str(given / "model"), prompts=[str(given / "problems.jsonl")],
        out=str(tmp_path / "out"), steps=2, prompts_per_step=3, samples=4, max_tokens=30,
        requests=2, how="full", dtype="float32", engine="hf",
    )  # fmt: skip
    path = tmp_path / "out" / "rollouts" / "step-00000001.jsonl"
    hooks = GrpoHooks(should_stop=lambda: num_lines(path) >= 4)
    summary = train_grpo(config, hooks=hooks)
    assert (summary["is_complete"], summary["model"], summary["updates"]) == (False, None, 0)
    assert 4 <= num_lines(path) < 12
    kept = path.read_bytes()
    assert train_grpo(config)["is_complete"]
    assert path.read_bytes().startswith(kept)


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["full", "lora"])
def test_it_learns_what_is_rewarded(given: Path, tmp_path: Path, how: Any) -> None:
    config = GrpoConfig(
        model=str(given / "model"), prompts=[str(given / "problems.jsonl")],
        out=str(tmp_path / "out"), steps=8, prompts_per_step=4, samples=8, max_tokens=24, how=how,
        dtype="float32", lr=3e-3 if how == "full" else 2e-2, engine="hf", checkpoint_every=100,
    )  # fmt: skip
    train_grpo(config)
    accuracy = [line["accuracy"] for line in lines_of(tmp_path / "out")]
    assert sum(accuracy[-2:]) / 2 > sum(accuracy[:2]) / 2 + 0.2


# -- problems --------------------------------------------------------------------------------------


def test_scores_of_files_with_reference_answers() -> None:
    number, word = Item("a", "1,234"), Item("b", "Paris")
    assert exact(number, "first 7, then 1234.").value == 1
    assert exact(number, "1234, then 7").value == 0
    assert exact(word, " paris. ").value == 1
    assert exact(word, "It is Paris").value == 0
    box = Item("c", "042")
    assert boxed(box, r"so \boxed{7}, no: \boxed{ 42 }.").value == 1
    assert boxed(box, r"42").value == 0
    assert boxed(box, r"\boxed{42} or \boxed{43}").value == 0
    assert boxed(Item("d", r"\boxed{\frac{1}{2}}"), r"\boxed{\frac{1}{2} }").value == 1
    assert last_boxed(r"\boxed{a{b}c} \boxed{d") == "a{b}c"
    assert last_boxed("none") is None


def test_problems_that_are_made_are_scored_by_their_own_checker() -> None:
    found = load_problems("program,tree", Source(limit=6), "6-7")
    assert len(found.items) == 6
    assert {item.gold.task for item in found.items} == {"program", "tree"}
    for item in found.items:
        assert found.score(item, item.gold.response()).value == 1
        assert found.score(item, item.gold.response()[:-1] + "?").value == 0
    other = load_problems("program,tree", Source(limit=6, split="valid"), "6-7")
    assert not {i.prompt_id for i in found.items} & {i.prompt_id for i in other.items}


def test_tasks_that_cannot_reward_are_refused(tmp_path: Path) -> None:
    path = write_problems(tmp_path / "problems.jsonl")
    with pytest.raises(UnknownName, match="unknown task 'exactly'; did you mean 'exact'"):
        load_problems("exactly", Source(paths=(path,)))
    with pytest.raises(InvalidInput, match="task instruct has no score to learn from"):
        load_problems("instruct", Source(paths=(path,)))
    with pytest.raises(UnknownName, match="unknown task 'program,nope'"):
        load_problems("program,nope", Source(), "12-24")
    with pytest.raises(InvalidInput, match="task exact has no sizes"):
        load_problems("exact", Source(paths=(path,)), "12-24")
    with pytest.raises(InvalidInput, match="task chain makes its own problems"):
        load_problems("chain", Source(paths=(path,)))
    (tmp_path / "bare.jsonl").write_text('{"prompt": "why?"}\n')
    with pytest.raises(InvalidInput, match="--reference-field"):
        load_problems("exact", Source(paths=(tmp_path / "bare.jsonl",)))


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--reward", "r2", "--scale", "group"], "the weight of KV cancels"),
        (["--reward", "r9"], "reward is 'r9'"),
        (["--kv-measure", "peak"], "kv_measure is 'peak'"),
        (["--samples", "1"], "samples is 1"),
        (["--engine", "packed"], "engine 'packed' uses up the weights"),
        (["--engine", "vllm"], "unknown engine 'vllm'"),
        (["--valid-split", "0-10"], "valid and valid_split are both given"),
        (["--task", "multipart2"], "unknown task 'multipart2'"),
        (["--engine", "vllm", "--dry-run"], "unknown engine 'vllm'"),
        (["--seed", "-1"], "seed is -1"),
        (["--rank", "8"], "--rank is of a LoRA, and all weights are trained; leave it out"),
        (
            ["--prompts-per-step", "9"],
            "a step has 9 problems and there are 8; give more, or --prom",
        ),
        (["--limit", "2"], "a step has 3 problems and there are 2"),
        (["--seed", str(1 << 63)], f"seed is {1 << 63}"),
        (["--kv-measure", "9" * 5000], "it is cost, same, or a number of tokens"),
        (["--config", "."], "cannot read .: Is a directory"),
        (["--full", "--lora"], "--lora and --full are both given"),
        (["--model", "nowhere/at-all", "--task", "chain"], "chain makes its own problems"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    given: Path, tmp_path: Path, run: Run, more: list[str], message: str
) -> None:
    code, out, err = run(*flags(given, tmp_path / "out", *more))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_keeps_to_its_settings_and_data(given: Path, whole: Path, run: Run) -> None:
    code, _, err = run(*flags(given, whole, "--kv-weight", "0.7"))
    assert code == 2
    assert "was begun with kv_weight 0.5, not 0.7" in err
    code, _, err = run(*flags(given, whole, "--limit", "5"))
    assert code == 2
    assert "limit" in err


def test_problems_are_not_both_trained_and_validated_on(
    given: Path, tmp_path: Path, run: Run
) -> None:
    problems = str(given / "problems.jsonl")
    code, _, err = run(*flags(given, tmp_path / "out", "--valid", problems))
    assert code == 2
    assert "8 problems are both trained and validated on" in err


def test_problems_that_cannot_be_answered_are_no_validation(
    given: Path, tmp_path: Path, run: Run
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "say " * 3000, "answer": "7"}) + "\n")
    own = flags(given, tmp_path / "out")
    own = [str(long) if flag.endswith("valid.jsonl") else flag for flag in own]
    code, out, err = run(*own, "-q")
    assert (code, out) == (1, "")
    assert "no problem of the validation could be answered; the run's rejects.jsonl says why" in err
    assert "the prompt has" in (tmp_path / "out" / "rejects.jsonl").read_text()


def test_a_folder_of_something_else_is_left_alone(given: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    code, out, err = run(*flags(given, tmp_path))
    assert (code, out) == (2, "")
    assert "holds 'thesis.tex' and no run (config.json); name a folder that is new or empty" in err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    code, _, err = run(*flags(given, given / "model"))
    assert code == 2
    assert "config.json holds no settings" in err


def test_several_processes_are_refused(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Unsupported, match="in one process"):
        train_grpo(GrpoConfig(model=str(given / "model"), out=str(tmp_path / "out")))


# -- recipe and estimate ---------------------------------------------------------------------------


def test_the_recipe_is_estimated_from_its_shape_alone(run: Run) -> None:
    code, out, _ = run("--config", str(RECIPE), "--dry-run", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["num_parameters"] == 4_022_468_096
    assert found["steps"] == 50
    assert found["rollouts"] == 50 * 128 * 16
    assert found["peak_bytes"] > found["weights_bytes"] + found["optimizer_bytes"]
    assert found["pool_bytes"] == found["pool_slots"] * 147_456
    assert found["h100_hours"] > 0
    code, out, _ = run("--config", str(RECIPE), "--dry-run")
    assert code == 0
    assert "GiB" in out


def test_the_recipe_trains_a_tiny_model_of_its_architecture(tmp_path: Path, run: Run) -> None:
    """The recipe's own settings but for size, place and steps."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(
        "qwen3", vocab_size=len(tokenizer), eos_token_id=None, tie_word_embeddings=True
    )
    assert tomllib.loads(RECIPE.read_text())["architecture"]["model_type"] == "qwen3"
    LM.wrap(copy.deepcopy(model), tokenizer, dialect="tip").save(tmp_path / "base")
    problems = write_problems(tmp_path / "problems.jsonl", 24)
    code, out, err = run(
        "--config", str(RECIPE), "--model", str(tmp_path / "base"), "--device", "cpu",
        "--prompts", str(problems), "--valid-split", "0-30", "--split", "30-100",
        "--out", str(tmp_path / "out"), "--steps", "2", "--prompts-per-step", "2", "--samples", "2",
        "--max-tokens", "16", "--minibatches", "1", "--engine", "hf", "--json", "-q",
        "--reference-field", "answer", "--prompt-field", "prompt", "--pool-slots", "512",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["is_complete"]
    lm = LM.load(json.loads(out)["model"], engine="hf", pool_slots=512)
    assert lm.card.dialect == "tip"
