"""What a kill, a full disk or somebody's tidying leaves of a run, and what the same command makes
of it: the same result, or a line that says what is lost and what to do."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from data_kit import LIST, Server, checker, completion, good, said
from test_prefer import examples, flat, lm
from test_scoring import Lengths
from test_scoring import run as score
from test_train_loop import tiny_run
from tiny_lms import tiny_lm, tiny_tokenizer

from stretto.bench.stages import Folders, Stage
from stretto.data.client import Endpoint
from stretto.data.rows import read_lines
from stretto.data.settings import hold_to
from stretto.data.teacher import Teacher
from stretto.errors import InvalidInput, StrettoError
from stretto.eval import folder
from stretto.eval.rows import EvalRow
from stretto.files import write_atomically
from stretto.train import make_trainee, prefer
from stretto.train.loop import Journal
from stretto.train.saved import is_saved

MEASURED = {"machine": {"revision": None}}


@contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size`, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


# -- no room ---------------------------------------------------------------------------------------


def test_a_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Else it would be told as standard output's fault."""
    path = tmp_path / "summary.json"
    write_atomically(path, b"old")
    with no_room_beyond(100), pytest.raises(OSError, match="too large") as error:
        write_atomically(path, b"new" * 100)
    assert error.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_bytes() == b"old"


def test_metrics_that_do_not_fit_are_told_and_cut_off_later(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", writes=True)
    line = {"kind": "train", "step": 1, "loss": 0.5}
    journal.add(line)
    with no_room_beyond(60), pytest.raises(StrettoError, match=r"metrics.jsonl.*make room"):
        journal.add({**line, "step": 2})
    journal.cut(1)
    assert journal.last("train") == {"step": 1, "loss": 0.5}


def test_a_model_that_does_not_fit_is_told_on_one_line(tmp_path: Path) -> None:
    trainee = make_trainee(tiny_lm().model, tiny_tokenizer(), how="full")
    with no_room_beyond(10_000), pytest.raises(StrettoError, match="make room there"):
        trainee.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    assert is_saved(trainee.save(tmp_path / "model"))


# -- something was lost ----------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["model.safetensors", "stretto.json", "config.json"])
def test_a_model_that_lacks_a_file_is_not_taken_for_the_result(tmp_path: Path, lost: str) -> None:
    model = tmp_path / "model"
    assert not is_saved(model)
    model.mkdir()
    assert not is_saved(model)
    tiny_lm("pasta").save(model)
    assert is_saved(model)
    (model / lost).unlink()
    with pytest.raises(InvalidInput, match=rf"not a whole model.*{lost}.*remove it"):
        is_saved(model)


def test_weights_that_were_cut_off_are_not_taken_for_the_result(tmp_path: Path) -> None:
    weights = tiny_lm("pasta").save(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match="not a whole model"):
        is_saved(tmp_path / "model")


def test_rows_whose_settings_are_lost_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "a.run.json"
    with pytest.raises(InvalidInput, match=r"a.jsonl has rows and no a.run.json.*put it back"):
        hold_to(path, {"seed": 1}, "a.jsonl", has_rows=True)
    assert not path.exists()
    hold_to(path, {"seed": 1}, "a.jsonl")
    hold_to(path, {"seed": 1}, "a.jsonl", has_rows=True)


def test_rows_of_a_process_that_nothing_tells_of_are_not_mixed_with_others(tmp_path: Path) -> None:
    rows = [EvalRow(prompt_id=f"{k:016x}", number=k + 1, process=k) for k in range(2)]
    for _ in range(2):
        folder.add_environment(tmp_path, MEASURED)
    folder.check_environment(tmp_path, rows)
    folder.write_json(tmp_path / "environment.json", [MEASURED])
    with pytest.raises(InvalidInput, match="the process that measured 1 rows; put it back"):
        folder.check_environment(tmp_path, rows)
    (tmp_path / "environment.json").unlink()
    folder.check_environment(tmp_path, [])
    with pytest.raises(InvalidInput, match="measured 2 rows"):
        folder.check_environment(tmp_path, rows)


def test_a_stage_of_which_something_was_lost_is_not_done(tmp_path: Path) -> None:
    stage = Stage("one", 1, (), ("rows.jsonl", "model"))
    folders = Folders(tmp_path / "work", tmp_path / "kept")
    (folders.work / "one" / "model").mkdir(parents=True)
    for name in ("rows.jsonl", "model/weights"):
        (folders.work / "one" / name).write_text("x")
    assert not folders.is_done(stage)
    folders.keep(stage, {})
    assert folders.is_done(stage)
    for lost in ("rows.jsonl.gz", "model/weights"):
        (folders.results / "one" / lost).unlink()
        assert not folders.is_done(stage)
        folders.keep(stage, {})


def test_a_line_that_a_kill_has_cut_off_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": ')
    with pytest.raises(InvalidInput, match="2 is no JSON: the file's last line is cut off"):
        list(read_lines(path))
    path.write_bytes(b'{"a": \n{"a": 1}\n')
    with pytest.raises(InvalidInput, match="1 is no JSON"):
        list(read_lines(path))


@pytest.mark.parametrize("line", ["rubbish", '{"step": 2}', '{"kind": "train", "step": "x"}'])
def test_metrics_that_no_training_wrote_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "train", "step": 1}}\n{line}\n')
    with pytest.raises(InvalidInput, match=r"metrics.jsonl has a line.*take it out"):
        Journal(tmp_path / "metrics.jsonl", writes=True).cut(1)


# -- what a kill leaves running, or half done ------------------------------------------------------


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    """Who starts a run anew may have killed its parent alone."""
    loop, _ = tiny_run(tmp_path)
    with (
        Journal(tmp_path / "metrics.jsonl", writes=True).held(),
        pytest.raises(InvalidInput, match="is being trained in by another process; wait"),
    ):
        loop.run()
    assert loop.run().is_complete


def test_references_are_computed_beside_the_same_others_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the same numbers come out, to the last digit."""
    passes: list[tuple[str, ...]] = []
    compute = prefer._references

    def noting(model: Any, part: Sequence[Any], recorded: Any) -> Any:
        passes.append(tuple(e.key for e in part))
        return compute(model, part, recorded)

    monkeypatch.setattr(prefer, "_references", noting)
    answers = flat(examples())
    path, model = tmp_path / "reference.jsonl", lm().model

    def references() -> dict[str, Any]:
        return prefer.reference_logprobs(model, answers, path, identity={}, pack_tokens=300)

    whole, first = references(), list(passes)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(first[-1]) > 1
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    passes.clear()
    assert references() == whole
    assert passes == [first[-1]]
    assert path.read_bytes() == b"".join(lines)


def test_measures_of_a_prompt_are_kept_all_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which answers are measured together shows in the last digits: a kill must not part them."""
    monkeypatch.setattr("os.fsync", lambda _: path.exists() and sizes.append(lines_in(path)))
    path, sizes = tmp_path / "judged.jsonl", list[int]()

    score(Lengths(), tmp_path)
    assert sizes == [3, 6]


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n")


# -- a teacher -------------------------------------------------------------------------------------


def test_a_reply_that_no_request_can_hold_is_asked_about_all_the_same(tmp_path: Path) -> None:
    """Else its row would be left in every run, and what was paid for it lost."""
    odd = json.dumps(completion("<annotated>\ud800</annotated>"))
    replies = [(200, odd, {}), said("")]
    endpoint = {"model": "teacher-1", "max_attempts": 1}
    for number, reply in enumerate(replies):
        with Server(lambda request, n, r=reply: good(request, n) if n else r) as server:
            teacher = Teacher(
                Endpoint(**endpoint, url=server.url), checker(), tmp_path / f"{number}.jsonl"
            )
            made = teacher.annotate("question", LIST)
            teacher.close()
            assert made.details["rounds"] == 2
            assert len(server.requests) == 2
