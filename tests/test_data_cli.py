"""`stretto data annotate`, `check` and `stats` on the command line, without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import cpu_seconds
from data_kit import LIST, checker, save_tokenizer, structure, write_rows

from stretto.cli import main
from stretto.cli.data_options import worded
from stretto.data.annotators import checked_settings
from stretto.data.rows import Annotated, Answer, prompt_id, read_rows
from stretto.data.store import Store
from stretto.errors import InvalidInput
from stretto.models.folder import ModelFacts
from stretto.models.registry import ResolvedModel

TAGGED = "Write <sync/> between the two parts, as in this text, and then go on with it."
CRLF = LIST.replace("\n", "\r\n")
WIDE = LIST.replace("Sleep", "Schläfrig 日本語 🙂")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tok")
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, dict, str]:
    code = main(["data", *arguments, "--json", "--tokenizer", "tok"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else {}, captured.err


def annotate(capsys, *arguments: str) -> tuple[int, dict, str]:
    return run(capsys, "annotate", *arguments, "--annotator", "structure", "--out", "out")


def test_rows_of_all_kinds_are_annotated_or_rejected_byte_for_byte(place, capsys):
    responses = [LIST, CRLF, WIDE, TAGGED, " \n ", "Short.", f"  {LIST}\n\n", "a\ud800b"]
    rows = [{"instruction": "the same", "output": r} for r in responses]
    write_rows(place / "rows.jsonl", [*rows, rows[1]])
    code, result, _ = annotate(capsys, "rows.jsonl")
    assert code == 3
    assert (result["annotated"], result["rejected"], result["with_marks"]) == (5, 3, 4)
    assert result["reasons"] == {"empty-response": 1, "not-encodable": 1, "tags-in-response": 1}
    assert result["left_out"] == {"repeated": 1}
    kept = read_rows(place / "out" / "annotated.jsonl", Annotated)
    assert [row.response for row in kept] == [LIST, CRLF, WIDE, "Short.", f"  {LIST}\n\n"]
    assert [row.sample for row in kept] == [0, 1, 2, 5, 6]
    assert {row.prompt_id for row in kept} == {prompt_id("the same")}
    for row in kept:
        assert checker().reasons(row.response, row.annotated) == []
    code, result, _ = run(capsys, "check", "out/annotated.jsonl")
    assert (code, result["ok"], result["failed"]) == (0, 5, 0)


def test_a_torn_folder_is_gone_on_with_and_other_responses_are_refused(place, capsys):
    rows = [{"prompt": f"q{n}", "response": LIST} for n in range(5)]
    write_rows(place / "rows.jsonl", rows)
    annotate(capsys, "rows.jsonl")
    path = place / "out" / "annotated.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    code, result, _ = annotate(capsys, "rows.jsonl")
    assert (code, result["before"], result["annotated"]) == (0, 4, 5)
    assert path.read_bytes() == whole
    write_rows(place / "rows.jsonl", [{"prompt": "q1", "response": "another"}])
    code, _, error = annotate(capsys, "rows.jsonl")
    assert code == 2
    assert "another response 0 of prompt" in error


def test_another_response_under_a_rejected_key_is_refused_too(place, capsys):
    write_rows(place / "rows.jsonl", [{"prompt": "q", "response": TAGGED}])
    code, result, _ = annotate(capsys, "rows.jsonl")
    assert (code, result["rejected"]) == (3, 1)
    code, result, _ = annotate(capsys, "rows.jsonl")
    assert (code, result["before"]) == (3, 1)
    write_rows(place / "rows.jsonl", [{"prompt": "q", "response": LIST}])
    code, _, error = annotate(capsys, "rows.jsonl")
    assert code == 2
    assert "another response 0 of prompt" in error


def test_a_prompt_that_is_no_text_is_a_reject(place, capsys):
    write_rows(place / "rows.jsonl", [{"prompt": "q\ud800", "response": LIST}])
    code, result, _ = annotate(capsys, "rows.jsonl")
    assert (code, result["reasons"]) == (3, {"not-encodable": 1})


def test_two_processes_do_not_write_into_one_folder(place, capsys):
    write_rows(place / "rows.jsonl", [{"prompt": "q", "response": LIST}])
    (place / "out").mkdir()
    with Store(place / "out" / "annotated.jsonl", Annotated):
        code, _, error = annotate(capsys, "rows.jsonl")
    assert code == 2
    assert "another process" in error


def answer(prompt: str, sample: int = 0, **changes: object) -> dict:
    row = Answer(
        prompt_id=prompt_id(prompt), sample=sample, text=LIST, finish_reason="stop", ids=[5],
        origins="s", num_prompt_tokens=1, sequential_steps=1, completion_tokens=1,
        control_tokens=0,
    )  # fmt: skip
    return row.model_dump(exclude_none=True) | changes


def test_answers_find_their_prompts_and_cut_off_ones_are_left_out(place, capsys):
    rows = [answer("a"), answer("a", 1, finish_reason="length"), answer("b")]
    write_rows(place / "answers.jsonl", rows)
    code, _, error = annotate(capsys, "answers.jsonl")
    assert code == 2
    assert "--prompts" in error
    write_rows(place / "p.jsonl", [{"question": "a"}, {"question": "b"}])
    options = ["answers.jsonl", "--prompts", "p.jsonl", "--no-prompts"]
    code, result, error = annotate(capsys, *options)
    assert (code, result["annotated"]) == (0, 2)
    assert result["left_out"] == {"ended with length": 1}
    assert "1 answers were cut short and left out; --keep-unfinished keeps such" in error
    kept = read_rows(place / "out" / "annotated.jsonl", Annotated)
    assert [(row.prompt_id, row.prompt) for row in kept] == [
        (prompt_id("a"), None),
        (prompt_id("b"), None),
    ]
    code, result, _ = annotate(capsys, *options, "--keep-unfinished")
    assert (code, result["annotated"], result["before"]) == (0, 3, 2)


def test_settings_of_an_annotator_are_given_by_name(place, capsys):
    write_rows(place / "rows.jsonl", [{"prompt": "q", "response": LIST}])
    code, result, _ = annotate(capsys, "rows.jsonl", "--set", "min_tokens=500")
    assert (code, result["with_marks"]) == (0, 0)
    code, _, error = annotate(capsys, "rows.jsonl")
    assert code == 2
    assert 'set {"min_tokens": 500}, not {}' in error


SETTINGS = {
    "count=3": "no setting 'count' of its own; it has: max_groups, min_tokens",
    "unit=20": "no setting 'unit'",
    "name=x": "no setting 'name'",
    "min_tokens=abc": "min_tokens of annotator structure cannot be 'abc'",
    "min_tokens=null": "cannot be None",
    "min_tokens=2.5": "cannot be 2.5",
    "max_groups=0": "max_groups must be at least 1, got 0",
}


@pytest.mark.parametrize(("setting", "message"), SETTINGS.items(), ids=list(SETTINGS))
def test_settings_that_do_not_fit_are_refused_and_leave_no_trace(place, capsys, setting, message):
    write_rows(place / "rows.jsonl", [{"prompt": "q", "response": LIST}])
    code, _, error = annotate(capsys, "rows.jsonl", "--set", setting)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert annotate(capsys, "rows.jsonl")[0] == 0


@pytest.mark.parametrize("name", ["teacher", "structure", "likelihood", "apar"])
def test_settings_of_every_annotator_have_types(name):
    with pytest.raises(InvalidInput, match="no setting 'x'"):
        checked_settings(name, {"x": 1}, [])


def test_answers_are_skipped_by_their_own_fields(place, capsys):
    rows = [answer("a"), answer("b", control_tokens=4)]
    rows = [row | {"prompt": name} for row, name in zip(rows, "ab", strict=True)]
    write_rows(place / "answers.jsonl", rows)
    code, result, _ = annotate(capsys, "answers.jsonl", "--skip-if", "control_tokens")
    assert (code, result["annotated"]) == (0, 1)
    assert result["left_out"] == {"field control_tokens": 1}


def test_answers_and_rows_of_the_same_prompts_are_told_apart(place, capsys):
    write_rows(place / "answers.jsonl", [answer(p) | {"prompt": p} for p in "ab"])
    rows = [{"prompt": p, "response": r} for p, r in (("a", LIST), ("b", "Other."), ("c", LIST))]
    write_rows(place / "rows.jsonl", rows)
    code, result, _ = annotate(capsys, "answers.jsonl", "rows.jsonl")
    assert (code, result["annotated"]) == (0, 3)
    assert result["left_out"] == {"repeated": 1, "an answer has its key": 1}


def test_an_answer_with_another_prompt_than_its_name_says_is_refused(place, capsys):
    write_rows(place / "answers.jsonl", [answer("a") | {"prompt": "b"}])
    code, _, error = annotate(capsys, "answers.jsonl")
    assert code == 2
    assert "a prompt whose id is" in error


def annotated(name: str, response: str, marked: str) -> dict:
    return Annotated(
        prompt_id=prompt_id(name), response=response, annotated=marked, annotator="x"
    ).model_dump(exclude_none=True)


def test_check_names_each_bad_row_on_a_line_and_leaves_3(place, capsys):
    good = structure().annotate("", LIST)
    rows = [annotated("a", LIST, good.text), annotated("b", LIST, good.text + "\n<sync/>x")]
    write_rows(place / "a.jsonl", [*rows, rows[0]])
    code = main(["data", "check", "a.jsonl", "--tokenizer", "tok"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 3
    assert lines[0].startswith(f"a.jsonl:2 {prompt_id('b')}/0 text-differs")
    assert lines[1].startswith(f"a.jsonl:3 {prompt_id('a')}/0 repeated")
    assert lines[2].split() == ["rows", "3"]
    code, result, _ = run(capsys, "check", "a.jsonl")
    assert result["reasons"] == {"repeated": 1, "text-differs": 1}
    assert [fault["line"] for fault in result["faults"]] == [2, 3]


def test_stats_say_what_rows_amount_to(place, capsys):
    marked = structure().annotate("", LIST).text
    write_rows(place / "a.jsonl", [annotated("a", LIST, marked), annotated("b", "Yes.", "Yes.")])
    code, result, _ = run(capsys, "stats", "a.jsonl")
    steps = checker().parse(marked).trace.critical_path_steps
    assert code == 0
    assert (result["rows"], result["promises"], result["syncs"]) == (2, 3, 1)
    assert result["promises_per_row"] == {"0": 1, "3": 1}
    assert result["speedup"]["max"] == pytest.approx(checker().count(LIST) / steps)
    assert "definitions" in result
    main(["data", "stats", "a.jsonl", "--tokenizer", "tok"])
    out = capsys.readouterr().out
    assert "speedup of rows" in out
    assert out.count("#") > 40


def test_stats_of_answers_of_another_tokenizer_are_told(place, capsys):
    write_rows(place / "a.jsonl", [answer("a"), answer("b", ids=[999_999])])
    code, result, error = run(capsys, "stats", "a.jsonl")
    assert (code, result["rows"], result["failed"]) == (3, 1, 1)
    assert "name the tokenizer" in error


def test_stats_of_answers_are_of_pasta_alone(place, capsys):
    write_rows(place / "a.jsonl", [answer("a")])
    for dialect in ("apar", "plain"):
        code, _, error = run(capsys, "stats", "a.jsonl", "--dialect", dialect)
        assert code == 2
        assert "read as pasta alone" in error
        assert error.count("\n") == 1


BAD_ANSWERS = {
    "ids": {"ids": [-1]},
    "origins": {"origins": "x"},
    "2 origins for 1 ids": {"origins": "ss"},
    "0 logprobs for 1 ids": {"logprobs": []},
}


@pytest.mark.parametrize(("message", "changes"), BAD_ANSWERS.items(), ids=list(BAD_ANSWERS))
def test_answers_that_do_not_fit_together_are_refused(place, capsys, message, changes):
    write_rows(place / "a.jsonl", [answer("a"), answer("b") | changes])
    code, _, error = run(capsys, "stats", "a.jsonl")
    assert code == 2
    assert "a.jsonl:2 is no answer row: " + message in error


@pytest.mark.parametrize("verb", ["check", "stats"])
def test_a_file_that_cannot_be_read_is_told_on_one_line(place, capsys, verb):
    (place / "bad.jsonl").write_text('{"a": 1}\n{"b', encoding="utf-8")
    for file in ("missing.jsonl", "bad.jsonl"):
        code, _, error = run(capsys, verb, file)
        assert code == 2
        assert file in error
        assert error.count("\n") == 1


def test_an_output_that_cannot_be_written_is_told_on_one_line(place, capsys):
    write_rows(place / "rows.jsonl", [{"prompt": "q", "response": LIST}])
    (place / "out").write_text("a file", encoding="utf-8")
    code, _, error = annotate(capsys, "rows.jsonl")
    assert code == 2
    assert "out" in error
    assert error.count("\n") == 1
    (place / "out").unlink()
    (place / "out" / "annotated.jsonl").mkdir(parents=True)
    code, _, error = annotate(capsys, "rows.jsonl")
    assert (code, error.count("\n")) == (2, 1)


@pytest.mark.parametrize("tokenizer", ["a" * 300, "model.gguf", "tok2", "no/such"])
def test_a_tokenizer_that_is_none_is_told_on_one_line(place, capsys, tokenizer):
    write_rows(place / "a.jsonl", [annotated("a", LIST, LIST)])
    (place / "tok2").mkdir()
    (place / "model.gguf").write_bytes(b"GGUF")
    assert main(["data", "check", "a.jsonl", "--tokenizer", tokenizer]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "at line 1 column" not in error  # a .gguf file is read as a model


def test_the_tokenizer_of_an_adapter_is_its_bases(place, capsys, monkeypatch):
    write_rows(place / "a.jsonl", [annotated("a", LIST, structure().annotate("", LIST).text)])
    (place / "lora").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (place / "lora" / name).write_text("{}", encoding="utf-8")
    base = ResolvedModel("tok", place / "tok", "folder", ModelFacts.__new__(ModelFacts))
    monkeypatch.setattr("stretto.models.adapters.base_of", lambda *_: base)
    assert main(["data", "check", "a.jsonl", "--tokenizer", "lora"]) == 0
    assert "ok                   1" in capsys.readouterr().out


def test_a_name_that_is_too_long_for_a_folder_is_told_on_one_line(place, capsys):
    write_rows(place / "rows.jsonl", [{"prompt": "q", "response": LIST}])
    arguments = ["rows.jsonl", "--annotator", "structure", "--out", "x" * 300]
    code, _, error = run(capsys, "annotate", *arguments)
    assert (code, error.count("\n")) == (2, 1)


def test_figures_are_worded_for_people():
    assert worded({"a": 1234, "b": 0.5}) == "1,234 a, 0.5 b"
    assert [worded(v) for v in ({}, [], None, True, 1e-9)] == ["none", "none", "-", "yes", "1e-09"]


def test_data_is_imported_without_torch():
    code = (
        "import sys, importlib\n"
        "for name in ('annotate annotators check client items markup rows sample select settings "
        "stats wire store structure teacher teacher_demos teacher_prompt').split():\n"
        "    importlib.import_module('stretto.data.' + name)\n"
        "import stretto.cli.data\n"
        "assert not {'torch', 'transformers', 'openai'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_is_quick():
    stretto = str(Path(sys.executable).with_name("stretto"))
    assert cpu_seconds([stretto, "data", "annotate", "--help"]) < 1.5
