"""Sampling: rows that depend on prompt, number and seed alone, with the sampler's own log-probs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from data_kit import read_json_lines, write_rows
from tiny_lms import tiny_lm

from stretto import SamplingParams
from stretto.cli import main
from stretto.cli.data_sample import Job
from stretto.data.rows import Answer, Reject, prompt_id, read_rows
from stretto.data.sample import LETTERS, Task, request_seed, sample_answers, tasks_of
from stretto.errors import InvalidInput

STRETTO = str(Path(sys.executable).with_name("stretto"))
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
PROMPTS = [f"question {n}, and {'more ' * n}" for n in range(7)]


@pytest.fixture(scope="module")
def lm():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_lm("pasta")
    torch.set_num_threads(num_threads)


def by_key(rows) -> dict[str, Answer]:
    return {row.key: row for row in rows}


def test_a_prompt_is_answered_alike_wherever_it_stands(lm):
    together = by_key(sample_answers(lm, tasks_of(PROMPTS, 2), PARAMS, batch=5))
    tasks = list(reversed(tasks_of(PROMPTS[3:], 2)))
    apart = by_key(sample_answers(lm, tasks, PARAMS, batch=1))
    assert len(together) == 14
    for key, row in apart.items():
        assert row.ids == together[key].ids
        assert row.text == together[key].text
    assert len({row.text for row in together.values()}) > 7
    other = SamplingParams(max_tokens=24, temperature=1.0, seed=4)
    (changed,) = sample_answers(lm, [Task(PROMPTS[0])], other)
    assert changed.ids != together[changed.key].ids


def test_seeds_differ_by_prompt_and_run():
    seeds = {request_seed(seed, prompt) for seed in range(3) for prompt in PROMPTS}
    assert len(seeds) == 21
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_row_is_what_generate_gives(lm):
    (row,) = sample_answers(lm, [Task(PROMPTS[2], 1)], PARAMS)
    own = SamplingParams(max_tokens=24, temperature=1.0, seed=request_seed(3, PROMPTS[2]))
    completion = lm.submit(PROMPTS[2], own, sample=1).finish()
    trace = completion.trace
    assert row.ids == [t for s in trace.response for t in s.tokens]
    assert row.origins == "".join(LETTERS[o] for s in trace.response for o in s.origins)
    assert (row.text, row.finish_reason) == (completion.text, completion.finish_reason)
    assert row.sequential_steps == completion.usage.sequential_steps
    assert row.completion_tokens == completion.usage.completion_tokens
    assert row.num_prompt_tokens == len(lm.encode(lm.chat(PROMPTS[2])))
    assert (row.prompt, row.prompt_id, row.sample) == (PROMPTS[2], prompt_id(PROMPTS[2]), 1)


def test_forked_answers_have_their_log_probs_in_document_order(lm):
    """A script makes main promise twice; each token's log-prob is its own event's."""
    control = lm.vocabulary.control
    promise = [
        control["promise"], *lm.vocabulary.encode("ab"), control["tokens"],
        *lm.vocabulary.encode("1"), control["promise_end"],
    ]  # fmt: skip
    main_ids = [*lm.vocabulary.encode("hi "), *promise, *promise, control["sync"]]

    def script(thread: str, index: int) -> int | None:
        own = main_ids if thread == "main" else [*lm.vocabulary.encode("xyz"), control["async_end"]]
        return own[index] if index < len(own) else None

    params = SamplingParams(max_tokens=48, temperature=1.0)
    completion = lm.submit("hello", params, script=script).finish()
    from stretto.data.sample import answer_of

    row = answer_of(Task("hello"), completion)
    assert len(row.ids) == len(row.origins) == len(row.logprobs)
    assert row.origins.count("i") >= 2
    assert [p is None for p in row.logprobs] == [o == "i" for o in row.origins]
    events = {
        (e.thread, e.index): e.logprob for e in completion.events if e.type == "token"
    }  # fmt: skip
    at = 0
    counts: dict[str, int] = {}
    for segment in completion.trace.response:
        for token in segment.tokens:
            index = counts.get(segment.thread, 0)
            counts[segment.thread] = index + 1
            expected = events[segment.thread, index]
            assert row.ids[at] == token
            assert row.logprobs[at] == (
                None if expected is None else pytest.approx(expected, rel=1e-6)
            )
            at += 1
    assert at == len(row.ids)
    assert {"main.1", "main.2"} <= set(counts)


def test_what_cannot_be_answered_is_a_reject_and_the_rest_goes_on(lm):
    prompts = ["fine", "long " * 2000, "also fine", "\ud800", "  "]
    rows = list(sample_answers(lm, tasks_of(prompts), PARAMS))
    answers = [row for row in rows if isinstance(row, Answer)]
    rejects = {row.prompt_id: row.reasons[0] for row in rows if isinstance(row, Reject)}
    assert {row.prompt for row in answers} == {"fine", "also fine"}
    assert "positions" in rejects[prompt_id(prompts[1])]
    assert "surrogate" in rejects[prompt_id(prompts[3])]
    assert "empty" in rejects[prompt_id(prompts[4])]
    assert all(reason.startswith("not-answerable: ") for reason in rejects.values())


def test_what_stands_beside_two_files_is_not_the_same_file():
    def beside(name: str) -> tuple[str, str]:
        job = Job(Path(name), PARAMS, "auto", "auto", "m", 1, 1, True, True)
        return job.rejects.name, job.settings.name

    assert beside("d/answers.jsonl") == ("answers.rejects.jsonl", "answers.run.json")
    assert beside("d/at-0.5") != beside("d/at-0.7")
    names = ("a", "a.jsonl", "a.json", "a-run", "a.run", "a.1", "a.1.jsonl", ".jsonl")
    settings = [beside(name)[1] for name in names]
    assert len(set(settings)) == len(names)


def test_about_a_batch_is_under_way_and_refilled(lm, monkeypatch):
    sizes = []
    step = lm.step

    def counting(request):
        sizes.append(len(lm.scheduler.running) + len(lm.scheduler.waiting))
        step(request)

    monkeypatch.setattr(lm, "step", counting)
    rows = list(sample_answers(lm, tasks_of(PROMPTS, 3), PARAMS, batch=4))
    assert len(rows) == 21
    assert max(sizes) == 4
    assert sum(size == 4 for size in sizes) > len(sizes) / 2
    assert len(sizes) < 21 * 24 / 2


def test_leaving_early_frees_what_was_under_way(lm):
    rows = sample_answers(lm, tasks_of(PROMPTS), PARAMS, batch=4)
    next(rows)
    rows.close()
    assert not lm.scheduler.running
    assert not lm.scheduler.waiting
    lm.scheduler.check_integrity()
    with pytest.raises(InvalidInput, match="batch"):
        list(sample_answers(lm, [], PARAMS, batch=0))


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model, for the command."""
    return tiny_lm("pasta").save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": p, "overlap": ["e"] if p == PROMPTS[0] else []} for p in PROMPTS]
    write_rows(tmp_path / "p.jsonl", [*rows, rows[1], {"prompt": "long " * 2000}])
    return tmp_path


def command(model: Path, out: str, *more: str) -> list[str]:
    return [
        "data", "sample", "--prompts", "p.jsonl", "--out", out, "--model", str(model),
        "--dtype", "float32", "--max-tokens", "60", "--n", "2", "--batch", "3", "--json",
        "--engine", "hf", "--threads", "1", "--pool-slots", "2048", *more,
    ]  # fmt: skip


def rows_of(path: Path) -> dict[str, dict]:
    rows = read_json_lines(path)
    assert len({(r["prompt_id"], r["sample"]) for r in rows}) == len(rows)
    return {f"{r['prompt_id']}/{r['sample']}": r for r in rows}


def test_after_kill_9_the_same_command_gives_the_rows_of_an_undisturbed_run(model, place, capsys):
    assert main(command(model, "whole.jsonl")) == 3
    captured = capsys.readouterr()
    whole = json.loads(captured.out)
    assert (whole["asked_for"], whole["answers"], whole["rejected"]) == (16, 14, 2)
    assert whole["left"] == 0
    num_cut = whole["finish_reasons"].get("length", 0)
    assert (f"{num_cut} answers were cut short (--max-tokens 60)" in captured.err) == (num_cut > 0)
    path = place / "killed.jsonl"
    running = subprocess.Popen(
        [STRETTO, *command(model, "killed.jsonl")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ),
    )  # fmt: skip
    end = time.monotonic() + 120
    while time.monotonic() < end and not (path.exists() and path.read_bytes().count(b"\n") >= 2):
        assert running.poll() is None
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.wait()
    with path.open("ab") as file:
        file.write(b'{"prompt_id": "to')
    num_before = path.read_bytes().count(b"\n")
    assert main(command(model, "killed.jsonl")) == 3
    again = json.loads(capsys.readouterr().out)
    assert again["before"] >= num_before >= 2
    killed, undisturbed = rows_of(path), rows_of(place / "whole.jsonl")
    for row in undisturbed.values():
        row["logprobs"] = pytest.approx(row["logprobs"], abs=1e-3)  # of other batches: float32
    assert killed == undisturbed
    assert len(read_rows(place / "killed.rejects.jsonl", Reject)) == 2
    assert main(command(model, "killed.jsonl")) == 3
    assert json.loads(capsys.readouterr().out)["answers"] == 0


def test_choices_are_counted_and_prompts_left_out(model, place, capsys):
    code = main(
        command(model, "a.jsonl", "--skip-if", "overlap", "--max-prompt-tokens", "60",
                "--limit", "3", "--no-prompts", "--no-logprobs", "--n", "1", "--quiet")
    )  # fmt: skip
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert code == 0
    assert captured.err == ""
    assert result["answers"] == 3
    assert result["left_out"]["field overlap"] == 1
    rows = read_rows(place / "a.jsonl", Answer)
    assert all(row.prompt is None and row.logprobs is None for row in rows)
    assert PROMPTS[1] not in (place / "a.jsonl").read_text(encoding="utf-8")


def test_a_file_goes_on_only_as_it_was_begun(model, place, capsys):
    assert main(command(model, "a.jsonl", "--limit", "1")) == 0
    assert main(command(model, "a.jsonl", "--limit", "1", "--temperature", "0.5")) == 2
    error = capsys.readouterr().err
    assert "a.jsonl was begun with temperature 1.0, not 0.5" in error
    assert main(command(model, "a.jsonl", "--limit", "2", "--batch", "1", "--n", "3")) == 0
    assert len(read_rows(place / "a.jsonl", Answer)) == 6


def test_ctrl_c_keeps_what_is_done_and_leaves_130(model, place, capsys, monkeypatch):
    from stretto.lm import LM

    step, passes = LM.step, iter(range(10_000))

    def stepping(self, request):
        step(self, request)
        if next(passes) == 70:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LM, "step", stepping)
    assert main(command(model, "a.jsonl")) == 130
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["answers"] < 14
    assert result["left"] == 16 - result["answers"] - result["rejected"]
    assert len(read_rows(place / "a.jsonl", Answer)) == result["answers"]


BAD = {
    "--n must be at least 1, got 0": ["--n", "0"],
    "--batch must be at least 1": ["--batch", "0"],
    "such as 0-90": ["--split", "x"],
    "has no text in field body": ["--prompt-field", "body"],
    "temperature must be": ["--temperature", "-1"],
    "unknown method": ["--method", "zzz"],
}


@pytest.mark.parametrize(("message", "arguments"), BAD.items(), ids=list(BAD))
def test_bad_input_is_told_before_anything_is_loaded(
    place, message, arguments, monkeypatch, capsys
):
    monkeypatch.setattr("stretto.cli.answer.load", lambda *_, **__: pytest.fail("loaded a model"))
    assert main(command(Path("m"), "a.jsonl", *arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_method_that_rewrites_its_own_prompt_gives_whole_rows():
    """SoT forks points after injected turns, or drops its outline and asks anew."""
    plain = tiny_lm("plain")
    params = SamplingParams(max_tokens=40, temperature=1.0)
    rows = list(sample_answers(plain, tasks_of(PROMPTS, 2), params, method="sot", batch=8))
    assert len(rows) == 14
    for row in rows:
        assert isinstance(row, Answer)
        assert len(row.ids) == len(row.origins) == len(row.logprobs)
        assert set(row.origins) <= set("sfi")
        assert row.origins.count("s") + row.origins.count("f") == sum(
            p is not None for p in row.logprobs
        )
