"""`stretto train score`, `pairs` and `prefer`: stages by themselves, rounds, kills, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import forking_lm
from test_judges_llm import Server, shown, verdict

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.cli.train_score import WHY_SKIPPED
from stretto.data.annotators import Exhausted
from stretto.data.rows import prompt_id, read_rows
from stretto.errors import InvalidInput
from stretto.eval.judges import check_different, judges_of
from stretto.train.pairs import SKIPS, Pair, Scored

PROMPTS = ("one two", "three", "four five six", "seven")
TRAINING = ("--lr", "1e-3", "--epochs", "3", "--batch", "2", "--checkpoint-every", "2")
SAMPLING = ("--n", "4", "--max-tokens", "80", "--engine", "hf", "--sample-dtype", "float32")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts, and a baseline's answers."""
    folder = tmp_path_factory.mktemp("given")
    forking_lm(max_positions=1 << 14).save(folder / "model")
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    sample = ["data", "sample", "--model", str(folder / "model"), "--method", "sequential"]
    sample += ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "base.jsonl")]
    assert main([*sample, "--engine", "hf", "--max-tokens", "40", "--temperature", "1", "-q"]) == 0
    return folder


def flags(given: Path, *more: str, judge: str | None = None) -> list[str]:
    own = ["--model", str(given / "model"), "--baseline", str(given / "base.jsonl")]
    own += ["--judge", f"likelihood:{given / 'model'}" if judge is None else judge]
    return [*own, *more]


def prefer_flags(given: Path, out: Path, *more: str, judge: str | None = None) -> list[str]:
    return [
        "train", "prefer", *flags(given, judge=judge), "--prompts", str(given / "prompts.jsonl"),
        "--out", str(out), "--lambda", "1", "--dtype", "float32", *SAMPLING, *TRAINING, *more,
    ]  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def invoke(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture(scope="module")
def whole(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds from nothing to the end."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(prefer_flags(given, out, "--rounds", "2", "-q")) == 0
    return out


def adapter(folder: Path) -> bytes:
    return (folder / "model" / "adapter_model.safetensors").read_bytes()


# -- rounds ----------------------------------------------------------------------------------------


def test_each_round_leaves_a_model_that_decodes(whole: Path) -> None:
    for number in (1, 2):
        lm = LM.load(whole / f"round-{number}" / "model", engine="hf", dtype="float32")
        (found,) = lm.generate("one two", SamplingParams(max_tokens=20))
        assert found.usage.sequential_steps > 0
    assert adapter(whole / "round-1") != adapter(whole / "round-2")


def test_a_round_samples_with_the_model_of_the_round_before(whole: Path) -> None:
    first, second = (read_rows(whole / f"round-{k}" / "pairs.jsonl", Pair) for k in (1, 2))
    assert {p.prompt_id for p in first} == {p.prompt_id for p in second}
    for number in (1, 2):
        folder = whole / f"round-{number}" / "training"
        rows = [json.loads(line) for line in (folder / "reference.jsonl").read_text().splitlines()]
        assert rows
        assert all(abs(row["drift"]) < 1e-3 for row in rows)  # the sampler is the reference


def test_the_model_says_who_scored_what_it_learnt_from(given: Path, whole: Path) -> None:
    judges = judges_of(whole / "round-2" / "model")
    assert [j.partition("#")[0] for j in judges] == [f"likelihood:{given / 'model'}"]
    with pytest.raises(InvalidInput, match="report with another judge"):
        check_different(judges, judges[0])


def test_the_same_command_has_nothing_left_to_do(
    given: Path, whole: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    before = adapter(whole / "round-2")
    code, out, err = run(*prefer_flags(given, whole, "--rounds", "2"))
    assert (code, out) == (0, f"{whole / 'round-2' / 'model'}\n")
    assert "round 1: done before" in err
    assert adapter(whole / "round-2") == before


def test_a_folder_keeps_to_its_settings(
    given: Path, whole: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run(*prefer_flags(given, whole, "--lambda", "2"))
    assert (code, out) == (2, "")
    assert 'was begun with lambda "1", not "2"' in err
    assert err.count("\n") == 1


def test_stages_by_themselves_make_the_same_model(
    given: Path, whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    answers, scored = str(whole / "round-1" / "answers.jsonl"), str(tmp_path / "scored.jsonl")
    code, out, _ = run(
        "train", "score", *flags(given), "--answers", answers, "--out", scored, "--json"
    )
    assert code == 0
    assert json.loads(out)["judged"] == 16
    pairs = str(tmp_path / "pairs.jsonl")
    code, out, err = run(
        "train", "pairs", "--scored", scored, "--lambda", "1", "--out", pairs, "--json"
    )
    assert code == 0
    counts = json.loads(out)
    assert counts["best"]["quality"] > counts["worst"]["quality"]
    for reason, count in counts["skipped"].items():
        assert f"{count} prompts have no pair, {reason}: " in err
    assert Path(pairs).read_bytes() == (whole / "round-1" / "pairs.jsonl").read_bytes()
    code, out, _ = run(
        "train", "prefer", "--model", str(given / "model"), "--answers", answers, "--pairs", pairs,
        "--out", str(tmp_path / "out"), "--dtype", "float32", *TRAINING, "--json",
    )  # fmt: skip
    assert code == 0
    (entry,) = json.loads(out)["rounds"]
    assert entry["training"]["trained_pairs"] == counts["pairs"]
    assert entry["training"]["drift"] < 1e-3
    assert adapter(tmp_path / "out" / "round-1") == adapter(whole / "round-1")


def test_full_training_leaves_a_whole_model(
    given: Path, whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    folder = whole / "round-1"
    code, out, _ = run(
        "train", "prefer", "--model", str(given / "model"), "--full", "--dtype", "float32",
        "--answers", str(folder / "answers.jsonl"), "--scored", str(folder / "scored.jsonl"),
        "--lambda", "inf", "--out", str(tmp_path / "out"), *TRAINING,
    )  # fmt: skip
    assert code == 0
    made = Path(out.strip())
    assert (made / "model.safetensors").is_file()
    assert len(judges_of(made)) == 1
    assert LM.load(made, engine="hf").generate("one", SamplingParams(max_tokens=5))


def test_one_scoring_serves_every_lambda(
    whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    found = {}
    for lam in ("0", "inf"):
        out = tmp_path / f"{lam}.jsonl"
        scored = str(whole / "round-1" / "scored.jsonl")
        assert run("train", "pairs", "--scored", scored, "--lambda", lam, "--out", str(out))[0] == 0
        found[lam] = read_rows(out, Pair)
    rows = {r.key: r for r in read_rows(whole / "round-1" / "scored.jsonl", Scored)}
    for pair in found["0"]:
        sound = [r for r in rows.values() if r.prompt_id == pair.prompt_id and not r.flaws]
        best = rows[f"{pair.prompt_id}/{pair.best}"]
        assert best.speed.speedup == max(r.speed.speedup for r in sound)
    for pair in found["inf"]:
        sound = [r for r in rows.values() if r.prompt_id == pair.prompt_id and not r.flaws]
        best = rows[f"{pair.prompt_id}/{pair.best}"]
        assert best.quality == max(r.quality for r in sound if r.quality is not None)


def test_few_answers_and_why_there_is_no_pair_are_told(
    whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    lines = (whole / "round-1" / "scored.jsonl").read_text().splitlines(keepends=True)
    told = ["train", "pairs", "--lambda", "1", "--out", str(tmp_path / "pairs.jsonl"), "--scored"]
    assert "few to choose" not in run(*told, str(whole / "round-1" / "scored.jsonl"))[2]
    (tmp_path / "scored.jsonl").write_text(lines[0])
    code, _, err = run(*told, str(tmp_path / "scored.jsonl"))
    assert code == 0
    assert "1 prompts have no pair, one-candidate: fewer than two answers have a score" in err
    assert "1.0 answers a prompt are few to choose the best and the worst of" in err


def test_every_reason_for_no_pair_is_worded() -> None:
    assert set(WHY_SKIPPED) == set(SKIPS)


# -- kills and stops -------------------------------------------------------------------------------


def kill_when(arguments: list[str], is_time: Callable[[], bool]) -> None:
    """Runs a command in a process of its own and kills it with SIGKILL at the right moment."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        while process.poll() is None and not is_time():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, err.decode()
    finally:
        process.kill()
        process.wait()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_in_sampling_and_in_training_it_goes_on_to_the_same_model(
    given: Path, tmp_path: Path
) -> None:
    out, longer = tmp_path / "killed", ("--epochs", "20", "--threads", "1", "-q")
    folder = out / "round-1"
    arguments = prefer_flags(given, out, *longer)
    kill_when(arguments, lambda: num_lines(folder / "answers.jsonl") >= 3)
    assert not (folder / "training").exists()
    kill_when(arguments, lambda: num_lines(folder / "training" / "metrics.jsonl") >= 5)
    assert not (folder / "model").exists()
    assert main(arguments) == 0
    assert main(prefer_flags(given, tmp_path / "whole", *longer)) == 0
    assert adapter(folder) == adapter(tmp_path / "whole" / "round-1")
    for name in ("scored.jsonl", "pairs.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / "round-1" / name).read_bytes()


def test_a_judge_that_stops_leaves_what_it_measured(
    given: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., tuple[int, str, str]],
) -> None:
    from stretto.eval.judges.likelihood import LikelihoodJudge

    measure = LikelihoodJudge.measure

    def stops(self: Any, questions: Any) -> Iterator[Any]:
        for number, found in enumerate(measure(self, questions)):
            if number == 2:
                raise Exhausted("the cap of $1 is near; raise it")
            yield found

    arguments = ["train", "score", *flags(given), "--out", str(tmp_path / "scored.jsonl")]
    arguments += ["--answers", str(whole / "round-1" / "answers.jsonl"), "--json"]
    monkeypatch.setattr(LikelihoodJudge, "measure", stops)
    code, out, err = run(*arguments)
    assert (code, json.loads(out)["unjudged"], json.loads(out)["scored"]) == (3, 8, 8)
    assert "the cap of $1 is near" in err
    monkeypatch.setattr(LikelihoodJudge, "measure", measure)
    code, out, _ = run(*arguments)
    assert (code, json.loads(out)["judged_before"], json.loads(out)["judged"]) == (0, 8, 8)
    scored = tmp_path / "scored.jsonl"
    assert scored.read_bytes() == (whole / "round-1" / "scored.jsonl").read_bytes()


def test_prompts_without_a_baseline_are_counted_and_the_exit_says_so(
    given: Path, whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    lines = (given / "base.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "base.jsonl").write_text("".join(lines[:2]))
    code, out, _ = run(
        "train", "score", "--model", str(given / "model"), "--judge", "none", "--json",
        "--baseline", str(tmp_path / "base.jsonl"), "--out", str(tmp_path / "scored.jsonl"),
        "--answers", str(whole / "round-1" / "answers.jsonl"),
    )  # fmt: skip
    assert code == 3
    assert (json.loads(out)["no_baseline"], json.loads(out)["scored"]) == (2, 8)


def test_a_round_that_left_something_out_says_so(
    given: Path, whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    lines = (given / "base.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "base.jsonl").write_text("".join(lines[:3]))
    code, out, err = run(
        "train", "prefer", "--model", str(given / "model"), "--dtype", "float32", "--lambda", "0",
        "--judge", "none", "--answers", str(whole / "round-1" / "answers.jsonl"),
        "--baseline", str(tmp_path / "base.jsonl"), "--out", str(tmp_path / "out"), *TRAINING,
        "--prompts", str(given / "prompts.jsonl"), "--json",
    )  # fmt: skip
    assert code == 3
    assert "were left out" in err
    (entry,) = json.loads(out)["rounds"]
    assert entry["scoring"]["no_baseline"] == 1
    assert json.loads(out)["model"] is not None


def test_an_endpoint_judges_and_is_paid_once(
    given: Path, whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """It dies in between; the second run asks for what is missing and no more."""
    asked: list[tuple[str, str]] = []

    def respond(request: dict[str, Any], number: int) -> tuple[int, Any, dict[str, str]]:
        if number >= 20:
            return 401, {"error": {"message": "no more"}}, {}
        asked.append(shown(request))
        return verdict("A", 0.5)

    arguments = ["train", "score", "--model", str(given / "model"), "--judge", "llm:judge"]
    arguments += ["--baseline", str(given / "base.jsonl"), "--out", str(tmp_path / "scored.jsonl")]
    arguments += ["--answers", str(whole / "round-1" / "answers.jsonl"), "--json"]
    server = Server(respond)
    try:
        code, _, err = run(*arguments, "--judge-url", server.url, "--concurrency", "1")
    finally:
        server.close()
    assert code == 2
    assert "refused with status 401" in err
    server = Server(lambda request, _: (asked.append(shown(request)), verdict("A", 0.5))[1])
    try:
        code, out, _ = run(*arguments, "--judge-url", server.url)
    finally:
        server.close()
    assert code == 0
    assert json.loads(out)["judged"] + json.loads(out)["judged_before"] == 16
    assert len(asked) == len(set(asked))
    rows = read_rows(tmp_path / "scored.jsonl", Scored)
    assert {row.quality for row in rows} == {1.0}  # a judge who prefers a place
    assert rows[0].judge is not None
    assert rows[0].judge.startswith("llm:judge;")


def test_references_judge_without_a_model(
    given: Path, whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """One prompt has no reference, and is counted and named."""
    references = tmp_path / "references.jsonl"
    lines = [{"instruction": p, "output": f"about {p}"} for p in PROMPTS[:3]]
    references.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = str(whole / "round-1" / "answers.jsonl")
    told = [*flags(given, judge="reference"), "--answers", answers, "--json"]
    told += ["--references", str(references)]
    code, out, err = run("train", "score", *told, "--out", str(tmp_path / "scored.jsonl"))
    assert code == 3
    assert f"1 prompts have no quality: {prompt_id(PROMPTS[3])}" in err
    assert (json.loads(out)["unrated"], json.loads(out)["no_quality"]) == (1, 4)
    rows = read_rows(tmp_path / "scored.jsonl", Scored)
    assert {row.quality is None for row in rows if row.prompt_id == prompt_id(PROMPTS[3])} == {True}
    assert {row.quality is None for row in rows if row.prompt_id != prompt_id(PROMPTS[3])} == {
        False
    }
    trained = str(tmp_path / "out")
    code, out, err = run("train", "prefer", *told, "--out", trained, "--lambda", "inf", *TRAINING)
    assert code == 3
    (entry,) = json.loads(out)["rounds"]
    assert (entry["scoring"]["unrated"], entry["pairs"]["skipped"]["one-candidate"]) == (1, 1)
    (judge,) = judges_of(tmp_path / "out" / "round-1" / "model")
    with pytest.raises(InvalidInput, match="report with another judge"):
        check_different([judge], "reference:chrf++;{}")
    references.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    code, _, err = run("train", "prefer", *told, "--out", trained, "--lambda", "inf", *TRAINING)
    assert (code, "was begun with references" in err) == (2, True)


def test_a_second_opponent_is_a_prompts_first_reference(
    given: Path, whole: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    shown_texts: list[tuple[str, str]] = []
    references = tmp_path / "references.jsonl"
    lines = [{"prompt": p, "gold": text} for p in PROMPTS for text in (f"gold {p}", "not this")]
    references.write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = Server(lambda request, _: (shown_texts.append(shown(request)), verdict("A", 0.5))[1])
    try:
        code, *_ = run(
            "train", "score", *flags(given, judge="llm:judge"), "--judge-url", server.url,
            "--answers", str(whole / "round-1" / "answers.jsonl"), "--reference-field", "gold",
            "--references", str(references), "--out", str(tmp_path / "scored.jsonl"),
        )  # fmt: skip
    finally:
        server.close()
    assert code == 0
    others = {text for pair in shown_texts for text in pair}
    assert {text for text in others if "gold" in text} == {f"gold {p}" for p in PROMPTS}
    assert "not this" not in others


# -- the model that sampled ------------------------------------------------------------------------


@pytest.fixture
def sampled(whole: Path, tmp_path: Path) -> Path:
    """A copy of the first round's answers, with what stands beside them."""
    for path in (whole / "round-1").glob("answers*"):
        shutil.copy(path, tmp_path)
    return tmp_path / "answers.jsonl"


def score_flags(given: Path, sampled: Path, *more: str) -> list[str]:
    own = ["train", "score", "--answers", str(sampled), "--baseline", str(given / "base.jsonl")]
    return [*own, "--judge", "none", "--out", str(sampled.with_name("scored.jsonl")), *more]


def test_the_model_that_sampled_is_the_one_noted_beside_the_answers(
    given: Path, sampled: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = run(*score_flags(given, sampled, "--json"))
    named, again, _ = run(*score_flags(given, sampled, "--json", "--model", str(given / "model")))
    assert (code, named) == (0, 0)
    assert out == again
    assert json.loads(out)["branches"] > 0
    assert "unclosed" in json.loads(out)["flaws"] or json.loads(out)["flaws"] == {}


@pytest.fixture
def other(given: Path, tmp_path: Path) -> Path:
    """The same weights under a card without control tokens."""
    folder = Path(shutil.copytree(given / "model", tmp_path / "other"))
    (folder / "stretto.json").unlink()
    return folder


@pytest.mark.parametrize("verb", ["score", "prefer"])
def test_another_model_than_the_one_that_sampled_is_refused(
    verb: str, given: Path, sampled: Path, other: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    told = score_flags(given, sampled, "--model", str(other))
    if verb == "prefer":
        told = [*prefer_flags(given, sampled.with_name("out"), "--answers", str(sampled))]
        told[told.index("--model") + 1] = str(other)
    code, out, err = run(*told)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"was sampled by '{given / 'model'}' of fingerprint" in err
    assert "name the model that sampled (--model)" in err
    assert not sampled.with_name("out").exists()


def test_a_model_that_sampled_and_is_gone_is_asked_for(
    given: Path, sampled: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """The hub is not: it may have another model of that name."""
    notes = sampled.with_name("answers.run.json")
    notes.write_text(notes.read_text().replace(str(given / "model"), "org-of-nobody/none"))
    code, out, err = run(*score_flags(given, sampled))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "was sampled by 'org-of-nobody/none', which is not here; name where it is" in err
    assert run(*score_flags(given, sampled, "--model", str(given / "model")))[0] == 0


def test_without_notes_a_model_without_the_control_tokens_is_refused(
    given: Path, sampled: Path, other: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    sampled.with_name("answers.run.json").unlink()
    code, _, err = run(*score_flags(given, sampled))
    assert (code, err.count("\n")) == (2, 1)
    assert "have control tokens, and no answers.run.json says which model" in err
    code, _, err = run(*score_flags(given, sampled, "--model", str(other)))
    assert (code, err.count("\n")) == (2, 1)
    assert f"have control tokens that {other} has not; name the model" in err
    assert run(*score_flags(given, sampled, "--model", str(given / "model")))[0] == 0
    plain = score_flags(given, given / "base.jsonl", "--out", str(sampled.with_name("p.jsonl")))
    assert run(*plain)[0] == 0  # answers without control tokens are of any model


def test_a_run_is_not_taken_for_its_model(
    given: Path, whole: Path, sampled: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    expected = f"{whole} is a training run; its model is {whole / 'round-2' / 'model'}"
    sampling = ["data", "sample", "--prompts", str(given / "prompts.jsonl"), "--out", "x.jsonl"]
    for told in (
        score_flags(given, sampled, "--model", str(whole)),
        [*sampling, "--model", str(whole)],
        ["run", "one", "--model", str(whole)],
        ["train", "sft", "--data", str(sampled), "--out", "x", "--model", str(whole)],
        ["eval", "run", "--task", "multipart", "--out", "x", "--arm", f"a={whole}"],
    ):
        code, out, err = run(*told)
        assert (code, out, err.count("\n")) == (2, "", 1), told
        assert expected in err


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lambda", "slow"], "lambda must be a number from 0 on, or inf, got 'slow'"),
        (["--n", "1"], "--n must be at least 2, got 1"),
        (["--alpha", "2"], "--alpha must be from 0 to 1, got 2.0"),
        (["--variant", "speed"], "unknown variant 'speed'; did you mean 'speedup'?"),
        (["--judge", "none"], "lambda 1 needs a quality"),
        (["--judge", "oracle"], "unknown judge 'oracle'"),
        (["--judge", "reference"], "judge reference needs answers; name a file (--references)"),
        (["--judge", "none", "--references", "a.jsonl"], "judge none has no use for --references"),
        (["--references", "a.jsonl"], "judge likelihood has no use for --references"),
        (["--reference-field", "a"], "--reference-field is of references"),
        (["--judge", "llm:m", "--references", "a.jsonl"], "cannot read a.jsonl"),
        (["--pairs", "p.jsonl"], "come with their answers"),
        (["--answers", "a.jsonl", "--answers", "a.jsonl"], "a.jsonl"),
        (["--schedule", "step"], "unknown schedule 'step'"),
        (["--epochs", "0"], "--epochs must be a number above 0, got 0.0"),
        (["--epochs", "inf"], "--epochs must be a number above 0, got inf"),
        (["--margin", "nan"], "--margin must be a number, got nan"),
        (["--max-grad-norm", "-1"], "--max-grad-norm must be a number above 0, got -1.0"),
        (["--dtype", "int8"], "weights of int8 can sample"),
        (["--targets", "q_proj,c_attn"], "the model has no layer 'c_attn' to adapt"),
        (["--targets", ","], "name no layer"),
        (["--full", "--rank", "4"], "--rank is of a LoRA, and all weights are trained; leave it"),
        (["--full", "--targets", "mlp"], "--targets is of a LoRA, and all weights are trained"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    given: Path,
    tmp_path: Path,
    run: Callable[..., tuple[int, str, str]],
    more: list[str],
    message: str,
) -> None:
    code, out, err = run(*prefer_flags(given, tmp_path / "out", *more))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_place_that_cannot_be_is_told_in_one_line(
    given: Path, whole: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    scored = str(whole / "round-1" / "scored.jsonl")
    code, _, err = run("train", "pairs", "--scored", scored, "--out", f"{scored}/pairs.jsonl")
    assert code == 2
    assert "cannot be made" in err
    code, _, err = run(*prefer_flags(given, Path(scored)))
    assert code == 2
    assert err.count("\n") == 1


def test_pairs_by_a_quality_that_nobody_gave_are_refused(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    row = Scored(
        prompt_id="a" * 16, sample=0, baseline_tokens=9, text_tokens=9, control_tokens=0, steps=9
    )
    (tmp_path / "scored.jsonl").write_text(row.model_dump_json(exclude_none=True) + "\n")
    arguments = ["train", "pairs", "--scored", str(tmp_path / "scored.jsonl")]
    arguments += ["--out", str(tmp_path / "pairs.jsonl")]
    code, _, err = run(*arguments)
    assert code == 2
    assert "lambda 4 needs a quality, and no judge was asked" in err
    assert run(*arguments, "--lambda", "0")[0] == 0


def test_several_processes_do_not_sample(
    given: Path,
    tmp_path: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(*prefer_flags(given, tmp_path / "out"))
    assert code == 2
    assert "several processes can train on pairs but not sample" in err


# -- several processes -----------------------------------------------------------------------------


def test_two_processes_take_the_steps_of_one(given: Path, whole: Path, tmp_path: Path) -> None:
    """They share out the references, each reads all of them, and their pairs add up."""
    folder = whole / "round-1"
    arguments = [
        "train", "prefer", "--model", str(given / "model"), "--dtype", "float32", *TRAINING,
        "--answers", str(folder / "answers.jsonl"), "--pairs", str(folder / "pairs.jsonl"),
        "--pack-tokens", "64", "--json",
    ]  # fmt: skip
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "stretto"]
    found = subprocess.run(
        [sys.executable, *run, *arguments, "--out", str(tmp_path / "two")],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert len(found.stdout.splitlines()) == 1  # one of them speaks
    training = tmp_path / "two" / "round-1" / "training"
    assert num_lines(training / "reference.jsonl") == num_lines(training / "reference.1.jsonl") > 0
    assert main([*arguments, "--out", str(tmp_path / "one")]) == 0
    one, two = (steps_of(tmp_path / name / "round-1" / "training") for name in ("one", "two"))
    assert [line["num_packs"] for line in one] == [line["num_packs"] for line in two]
    assert max(line["num_packs"] for line in one) > 1
    for name in ("loss", "gap", "grad_norm"):
        assert [x[name] for x in two] == pytest.approx([x[name] for x in one], rel=1e-3, abs=1e-3)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# -- the judge that scored may not report ----------------------------------------------------------


@pytest.fixture(scope="module")
def judged(given: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the model of round 1, judged by one that scored nothing."""
    out = tmp_path_factory.mktemp("eval") / "run"
    arguments = ["--task", "instruct", "--prompts", str(given / "prompts.jsonl"), "--pairs", "0"]
    arguments += ["--model", str(whole / "round-1" / "model"), "--baseline", str(given / "model")]
    arguments += ["--max-tokens", "20", "--dtype", "float32", "--engine", "hf", "--out", str(out)]
    assert main(["eval", "run", *arguments]) == 0
    assert main(["eval", "judge", str(out), *another_judge(out.parent)]) == 0
    return out


def another_judge(folder: Path) -> list[str]:
    place = folder / "another"
    if not place.exists():
        lm = forking_lm()
        with torch.no_grad():
            lm.model.model.layers[0].mlp.up_proj.weight *= 1.5
        lm.save(place)
    return ["--judge", f"likelihood:{place}"]


def test_a_run_of_a_trained_model_is_not_judged_by_who_scored_its_answers(
    given: Path, judged: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    renamed = tmp_path / "renamed"
    shutil.copytree(given / "model", renamed)
    before = (judged / "verdicts.likelihood.jsonl").read_bytes()
    for model in (given / "model", renamed):
        code, out, err = run("eval", "judge", str(judged), "--judge", f"likelihood:{model}")
        assert (code, out) == (2, "")
        assert f"likelihood:{model}#" in err.splitlines()[-1]
        assert "report with another judge" in err.splitlines()[-1]
    assert (judged / "verdicts.likelihood.jsonl").read_bytes() == before


@pytest.mark.parametrize("verb", ["compare", "plot"])
def test_verdicts_of_who_scored_are_not_compared_wherever_they_came_from(
    verb: str, whole: Path, judged: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    more = ["--out", str(tmp_path / "out")]
    assert run("eval", verb, str(judged), *more)[0] == 0
    copy = tmp_path / "copy"
    shutil.copytree(judged, copy)
    (scorer,) = judges_of(whole / "round-1" / "model")
    file = copy / "verdicts.likelihood.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "judge": scorer}) + "\n" for row in rows))
    code, _, err = run("eval", verb, str(copy), *more)
    assert code == 2
    assert "report with another judge" in err


def test_a_model_made_of_a_trained_one_says_who_scored_too(whole: Path, tmp_path: Path) -> None:
    from stretto.train.lora import Lora
    from stretto.train.trainee import open_trainee

    start = whole / "round-1" / "model"
    judges = judges_of(start)
    assert len(judges) == 1
    LM.load(start, engine="hf", dtype="float32").save(tmp_path / "merged")
    open_trainee(start, how="full", dtype="float32").save(tmp_path / "full")
    open_trainee(start, how="lora", dtype="float32").save(tmp_path / "further")
    own = open_trainee(tmp_path / "full", how="lora", lora=Lora(rank=2), dtype="float32")
    own.save(tmp_path / "adapter")
    for name in ("merged", "full", "further", "adapter"):
        assert judges_of(tmp_path / name) == judges
    (tmp_path / "adapter" / "preference.json").unlink()
    assert judges_of(tmp_path / "adapter") == judges  # its base says so
