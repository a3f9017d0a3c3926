"""Rows, stores, choices and settings of data files: what is read, kept, and refused."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
from data_kit import read_json_lines, write_rows

from stretto.data.rows import (
    Annotated,
    Answer,
    PromptBook,
    Reject,
    prompt_id,
    read_rows,
    read_sources,
)
from stretto.data.select import Selection, Split, select
from stretto.data.settings import hold_to
from stretto.data.store import Store
from stretto.errors import InvalidInput, StrettoError
from stretto.models.fingerprint import fingerprint


def reject(name: str, sample: int = 0) -> Reject:
    return Reject(prompt_id=name, sample=sample, reasons=["x: y"], text="a\nb \u2028 \ud800 ü")


# -- rows ------------------------------------------------------------------------------------------


def test_a_prompt_has_a_name_even_if_it_is_no_text():
    assert prompt_id("a") == "ca978112ca1bbdca"
    assert prompt_id("\ud800") != prompt_id("\ud801")


def test_sources_take_the_first_known_field_and_say_where_they_stand(tmp_path):
    path = write_rows(
        tmp_path / "p.jsonl",
        [{"instruction": "a", "output": "b", "tag": [1]}, {"question": "c", "other": 1}],
    )
    first, second = read_sources([path], keep_fields=("tag",))
    assert (first.prompt, first.response, first.fields) == ("a", "b", {"tag": [1]})
    assert (second.prompt, second.response, second.name) == ("c", None, f"{path}:2")


BAD_SOURCES = {
    "no JSON": '{"prompt": "a"}\n{"prompt": ',
    "not an object": "[1]\n",
    "no text in field prompt": '{"text": "a"}\n',
    "has no text in field": '{"prompt": "  "}\n',
}


@pytest.mark.parametrize(("message", "text"), BAD_SOURCES.items(), ids=list(BAD_SOURCES))
def test_bad_lines_of_a_users_file_are_told_with_their_place(tmp_path, message, text):
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=message) as error:
        read_sources([path])
    assert "\n" not in str(error.value)
    assert f"{path}:" in str(error.value)


def test_a_row_with_an_unknown_field_is_refused_with_its_place(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", [{"prompt_id": "0", "reasons": [], "oops": 1}])
    with pytest.raises(InvalidInput, match=r"r\.jsonl:1 is no reject row: oops"):
        read_rows(path, Reject)


def test_a_prompt_book_gives_prompts_back_and_names_what_it_lacks():
    row = Annotated(prompt_id=prompt_id("hi"), response="a", annotated="a", annotator="structure")
    assert PromptBook(["hi"]).prompt_of(row) == "hi"
    with pytest.raises(InvalidInput, match="--prompts"):
        PromptBook(["ho"]).prompt_of(row)


# -- stores ----------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_and_a_key_is_taken_once(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    rows = [reject("0" * 16), reject("1" * 16), reject("1" * 16, sample=1)]
    with Store(path, Reject) as store:
        for row in rows:
            store.add(row)
        with pytest.raises(InvalidInput, match="already"):
            store.add(rows[1])
    assert read_rows(path, Reject) == rows
    with Store(path, Reject) as store:
        assert len(store) == 3
        assert rows[2].key in store


@pytest.mark.parametrize("cut", [2, 5, 30])
def test_a_torn_last_line_is_cut_off_and_done_again(tmp_path, cut):
    path = tmp_path / "r.jsonl"
    with Store(path, Reject) as store:
        store.add(reject("0" * 16))
        store.add(reject("1" * 16))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with Store(path, Reject) as store:
        assert list(store.rows) == ["0" * 16 + "/0"]
        store.add(reject("1" * 16))
    assert path.read_bytes() == whole


def test_a_whole_row_that_lacks_its_line_end_is_kept(tmp_path):
    path = tmp_path / "r.jsonl"
    with Store(path, Reject) as store:
        store.add(reject("0" * 16))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with Store(path, Reject) as store:
        assert len(store) == 1
        store.add(reject("1" * 16))
    assert path.read_bytes().startswith(whole)
    assert len(read_rows(path, Reject)) == 2


@pytest.mark.parametrize(
    "text", ['{"prompt": "my only line"}', "notes", '{"prompt_id": "0"}', "[1, 2]\nx"]
)
def test_the_last_line_of_a_file_that_is_not_ours_is_not_torn(tmp_path, text):
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"mine\.jsonl:1"):
        Store(path, Reject)
    assert path.read_text(encoding="utf-8") == text


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path):
    path = tmp_path / "r.jsonl"
    with Store(path, Reject) as store:
        with pytest.raises(InvalidInput, match="another process"):
            Store(path, Reject)
        store.add(reject("0" * 16))
    with Store(path, Reject) as store:
        assert len(store) == 1


def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", [{"text": "precious"}])
    with pytest.raises(InvalidInput, match="is no reject row"):
        Store(path, Reject)
    assert read_json_lines(path) == [{"text": "precious"}]
    with pytest.raises(InvalidInput, match="is no reject row"):  # and the lock was given back
        Store(path, Reject)


def test_a_full_disk_leaves_whole_rows_and_says_so(tmp_path):
    path = tmp_path / "r.jsonl"
    with Store(path, Reject) as store:
        store.add(reject("0" * 16))
        size = path.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        import signal

        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        try:
            with pytest.raises(StrettoError, match="cannot write"):
                store.add(reject("1" * 16))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        assert path.stat().st_size == size
        store.add(reject("1" * 16))
    assert len(read_rows(path, Reject)) == 2


# -- choosing --------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path):
    rows = [{"prompt": f"question {i}", "overlap": ["x"] if i % 4 == 0 else []} for i in range(80)]
    path = write_rows(tmp_path / "p.jsonl", [*rows, rows[1]])
    return read_sources([path], keep_fields=("overlap",))


def test_splits_share_no_prompt_and_leave_none_out(sources):
    parts = [select(sources, Selection(Split.parse(s)))[0] for s in ("0-30", "30-90", "90-100")]
    assert all(parts)
    names = [{s.prompt_id for s in part} for part in parts]
    assert len(set().union(*names)) == sum(map(len, names))
    assert sum(map(len, parts)) == len(sources)


def test_a_larger_limit_keeps_what_a_smaller_one_did(sources):
    small, left_out = select(sources, Selection(limit=5))
    large, _ = select(list(reversed(sources)), Selection(limit=20))
    assert len({s.prompt_id for s in small}) == 5
    assert {s.prompt_id for s in small} <= {s.prompt_id for s in large}
    assert left_out == {"limit": len(sources) - len(small)}


def test_what_is_left_out_is_counted_by_reason(sources):
    chosen = Selection(Split(0, 50), skip_if=("overlap",), limit=10)
    kept, left_out = select(sources, chosen, fits=lambda prompt: not prompt.endswith("3"))
    assert left_out["field overlap"] == 20
    assert sum(left_out.values()) + len(kept) == len(sources)
    assert set(left_out) == {"field overlap", "split", "limit", "length"}
    assert not any(s.prompt.endswith("3") for s in kept)


@pytest.mark.parametrize("text", ["", "5", "90-10", "0-101", "-5-10", "a-b", "5-5", "nan-9"])
def test_a_split_that_is_no_range_is_refused(text):
    with pytest.raises(InvalidInput, match="such as 0-90"):
        Split.parse(text)


# -- settings --------------------------------------------------------------------------------------


def test_settings_hold_and_the_first_difference_is_named(tmp_path):
    path = tmp_path / "run.json"
    hold_to(path, {"seed": 1, "top": (1, 2)}, "it", {"model": "a"})
    hold_to(path, {"seed": 1, "top": [1, 2]}, "it", {"model": "b"})
    with pytest.raises(InvalidInput, match="it was begun with seed 1, not 2"):
        hold_to(path, {"seed": 2, "top": [1, 2]}, "it")
    with pytest.raises(InvalidInput, match="more null, not true"):
        hold_to(path, {"seed": 1, "top": [1, 2], "more": True}, "it")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidInput, match="unreadable"):
        hold_to(path, {}, "it")
    path.write_text(json.dumps([]), encoding="utf-8")
    with pytest.raises(InvalidInput, match="no settings"):
        hold_to(path, {}, "it")


def test_a_fingerprint_sees_any_small_file_and_training_of_a_large_one(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    weights = bytearray(os.urandom(9 << 20))
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    (tmp_path / "config.json").write_bytes(b"[]")
    second = fingerprint(tmp_path)
    weights[:: 1 << 12] = bytes(len(weights[:: 1 << 12]))
    (tmp_path / "model.safetensors").write_bytes(weights)
    third = fingerprint(tmp_path)
    assert len({first, second, third}) == 3
    for name in ("README.md", "training.log", "LICENSE.txt", ".hidden.json"):
        (tmp_path / name).write_text("not part of the model")
    assert fingerprint(tmp_path) == third
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(tmp_path) != third


def test_answers_round_trip_with_unknown_logprobs(tmp_path):
    row = Answer(
        prompt_id="0" * 16, text="a", finish_reason="stop", ids=[1, 2], origins="si",
        logprobs=[-0.5, None], num_prompt_tokens=1, sequential_steps=1, completion_tokens=1,
        control_tokens=0,
    )  # fmt: skip
    path = Path(tmp_path / "a.jsonl")
    with Store(path, Answer) as store:
        store.add(row)
    assert read_rows(path, Answer) == [row]
