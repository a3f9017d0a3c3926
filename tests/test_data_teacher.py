"""The teacher against an endpoint that misbehaves: nothing paid is lost, asked twice, or told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from data_kit import (
    LIST,
    Respond,
    Server,
    answer_in,
    checker,
    completion,
    good,
    said,
    save_tokenizer,
    sleepy,
    write_rows,
)

from stretto.cli import main
from stretto.data.annotate import annotate_into
from stretto.data.annotators import Annotation, Exhausted, Postponed, Refusal, Unanswered
from stretto.data.asker import RawReply
from stretto.data.client import Client, Endpoint, most_tokens
from stretto.data.items import Item
from stretto.data.markup import chunks_of, stripped
from stretto.data.rows import Annotated, Reject, read_rows
from stretto.data.teacher import Teacher
from stretto.data.teacher_prompt import LANGUAGE, first_messages, marked_texts
from stretto.errors import InvalidInput

KEY = "sk-very-secret-key-0123456789"
STRETTO = str(Path(sys.executable).with_name("stretto"))


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@contextmanager
def teaching(respond: Respond, raw: Path, **options: Any) -> Iterator[tuple[Teacher, Server]]:
    """A teacher whose waits are short, and its endpoint."""
    own = {k: options.pop(k) for k in ("concurrency", "temperature") if k in options}
    with Server(respond) as server:
        endpoint = Endpoint("teacher-1", server.url, **options)
        teacher = Teacher(endpoint, checker(), raw, **own)
        waits = teacher._sleep
        teacher._client._sleep = lambda seconds: waits(min(seconds, 0.01))
        try:
            yield teacher, server
        finally:
            teacher.close()


def items(number: int) -> list[Item]:
    return [Item(f"question {n}", LIST.replace("Three", f"{n}")) for n in range(number)]


def after(number: int, first: Respond, then: Respond) -> Respond:
    return lambda request, n: first(request, n) if n < number else then(request, n)


# -- asking and reading ----------------------------------------------------------------------------


def test_what_is_asked_holds_the_language_seven_examples_and_the_response(tmp_path):
    with teaching(good, tmp_path / "raw.jsonl") as (teacher, server):
        result = teacher.annotate("How?", LIST)
        request = server.requests[0]
    assert isinstance(result, Annotation)
    assert stripped(result.text) == LIST
    messages = request["messages"]
    assert messages[0] == {"role": "system", "content": LANGUAGE}
    assert len(messages) == 2 + 2 * 7
    assert messages[-1]["content"] == f"<question>How?</question>\n<answer>{LIST}</answer>"
    assert (request["temperature"], request["max_tokens"]) == (0.0, 2048)
    assert server.keys == {f"Bearer {KEY}"}


def test_lengths_are_measured_anew_and_the_told_ones_kept(tmp_path):
    with teaching(good, tmp_path / "raw.jsonl") as (teacher, _):
        result = teacher.annotate("How?", LIST)
    for chunk in chunks_of(result.text):
        assert 0 <= chunk.tokens - checker().count(chunk.content) < 10
    assert result.details["told"] == [70, 70, 70] or 70 in result.details["told"]
    assert (result.details["rounds"], result.details["model"]) == (1, "teacher-1")


def test_a_teacher_that_tidies_whitespace_is_mended(tmp_path):
    windows = LIST.replace("\n", "\r\n") + "  \r\n"

    def tidy(request, number):
        status, body, headers = good(request, number)
        text = body["choices"][0]["message"]["content"].replace("\r\n", "\n").replace("\n\n", "\n")
        return status, completion(text), headers

    with teaching(tidy, tmp_path / "raw.jsonl") as (teacher, server):
        result = teacher.annotate("How?", windows)
        assert len(server.requests) == 1
    assert stripped(result.text) == windows
    assert len(chunks_of(result.text)) == 3


BROKEN = {
    "text-differs": "<annotated>Something else.</annotated>",
    "no-annotated-text": "I cannot do that.",
    "nested-promise": f"<annotated>{LIST.replace('2.', '<sync/>2.')}</annotated>",
}
BROKEN["nested-promise"] = (
    BROKEN["nested-promise"]
    .replace("1. **", '<promise topic="x y" tokens="90"/><async>1. **')
    .replace("3. **", "</async>3. **")
)


@pytest.mark.parametrize(("code", "reply"), BROKEN.items(), ids=list(BROKEN))
def test_a_broken_reply_is_asked_for_once_more_with_the_reasons(tmp_path, code, reply):
    respond = after(1, lambda *_: said(reply), good)
    with teaching(respond, tmp_path / "raw.jsonl") as (teacher, server):
        result = teacher.annotate("How?", LIST)
        second = server.requests[1]["messages"]
    assert isinstance(result, Annotation)
    assert result.details["rounds"] == 2
    assert second[-2] == {"role": "assistant", "content": reply}
    assert code in second[-1]["content"]


def test_a_reply_that_stays_broken_is_refused_with_its_text(tmp_path):
    reply = "<annotated>Something else.</annotated>"
    with teaching(lambda *_: said(reply), tmp_path / "raw.jsonl") as (teacher, server):
        result = teacher.annotate("How?", LIST)
        assert len(server.requests) == 2
    assert isinstance(result, Refusal)
    assert result.reasons[0].startswith("text-differs")
    assert result.text == "Something else."


def test_a_reply_cut_off_is_no_verdict_and_more_room_asks_anew(tmp_path):
    raw = tmp_path / "raw.jsonl"
    cut = said("<annotated>Three things", "length")
    with teaching(lambda *_: cut, raw, max_tokens=50) as (teacher, server):
        for _ in range(2):
            with pytest.raises(Postponed, match="50 tokens"):
                teacher.annotate("How?", LIST)
        assert len(server.requests) == 1
    with teaching(good, raw, max_tokens=500) as (teacher, server):
        assert isinstance(teacher.annotate("How?", LIST), Annotation)
        assert len(server.requests) == 1


def test_a_parameter_of_another_name_is_found(tmp_path):
    def picky(request, number):
        if "max_tokens" in request:
            error = {"message": "use 'max_completion_tokens' instead of 'max_tokens'"}
            return 400, {"error": error}, {}
        return good(request, number)

    with teaching(picky, tmp_path / "raw.jsonl") as (teacher, server):
        assert isinstance(teacher.annotate("How?", LIST), Annotation)
        assert isinstance(teacher.annotate("Why?", LIST), Annotation)
        assert [("max_tokens" in r) for r in server.requests] == [True, False, False]
    with teaching(picky, tmp_path / "raw2.jsonl", concurrency=4) as (teacher, server):
        report = annotate_into(tmp_path / "out", items(8), teacher, checker())
    assert len(report.annotated) == 8


def test_the_marked_answer_is_found_behind_thoughts_and_around_marks_of_its_own():
    assert marked_texts("a <annotated> b </annotated> c") == [" b "]
    assert marked_texts("</annotated><annotated>") == []
    assert marked_texts("no marks") == []
    thoughts = "I try <annotated>x</annotated>. No: <annotated>y</annotated>"
    assert marked_texts(thoughts)[0] == "y"


def test_a_response_with_the_replys_own_marks_in_it_is_annotated(tmp_path):
    response = LIST.replace("a glass", "<annotated>a glass</annotated></answer>")
    with teaching(good, tmp_path / "raw.jsonl") as (teacher, _):
        result = teacher.annotate("How?", response)
    assert isinstance(result, Annotation)
    assert stripped(result.text) == response
    assert len(chunks_of(result.text)) == 3


# -- nothing paid is lost --------------------------------------------------------------------------


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_reply_is_on_disk_before_it_is_read_and_is_not_paid_for_twice(tmp_path, monkeypatch):
    raw = tmp_path / "raw.jsonl"
    with teaching(good, raw) as (teacher, server):
        with monkeypatch.context() as patch:
            patch.setattr(teacher, "_read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                teacher.annotate("How?", LIST)
        (kept,) = read_rows(raw, RawReply)
        assert kept.text.startswith("<annotated>")
        assert (kept.tokens_in, kept.tokens_out, kept.model) == (1000, 100, "teacher-1")
        assert isinstance(teacher.annotate("How?", LIST), Annotation)
        assert len(server.requests) == 1
        assert teacher.ledger()["from_disk"] == 1


TROUBLE: dict[str, Respond] = {
    "429": lambda *_: (429, {"error": {"message": "slow"}}, {"Retry-After": "7"}),
    "500": lambda *_: (500, "oops", {}),
    "garbage": lambda *_: (200, "<html>not json", {}),
    "no choices": lambda *_: (200, {"id": "x"}, {}),
    "no text": lambda *_: (200, completion(None), {}),
    "choices that are a number": lambda *_: (200, completion("x", choices=5), {}),
    "choices that are a mapping": lambda *_: (200, completion("x", choices={"a": 1}), {}),
    "nested too deeply": lambda *_: (200, "[" * 100_000, {}),
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=list(TROUBLE))
def test_trouble_that_passes_is_waited_out(tmp_path, trouble):
    with teaching(after(2, trouble, good), tmp_path / "raw.jsonl") as (teacher, server):
        assert isinstance(teacher.annotate("How?", LIST), Annotation)
        assert len(server.requests) == 3
        assert teacher.ledger()["retries"] == 2
    kept = read_rows(tmp_path / "raw.jsonl", RawReply)
    assert [row.text != "" for row in kept if row.lost is None] == [True]


def test_a_reply_that_was_all_thoughts_is_paid_once(tmp_path):
    raw = tmp_path / "raw.jsonl"
    thoughts = 200, completion(None, "length"), {}
    for _ in range(2):
        with (
            teaching(lambda *_: thoughts, raw) as (teacher, server),
            pytest.raises(Postponed, match="cut off at 2048 tokens"),
        ):
            teacher.annotate("How?", LIST)
    assert server.requests == []
    assert len(read_rows(raw, RawReply)) == 1


def test_a_reply_that_is_withheld_is_a_refusal(tmp_path):
    withheld = 200, completion(None, "content_filter"), {}
    with teaching(lambda *_: withheld, tmp_path / "raw.jsonl") as (teacher, server):
        result = teacher.annotate("How?", LIST)
        assert len(server.requests) == 2
    assert isinstance(result, Refusal)
    assert result.reasons[0].startswith("no-annotated-text")


def test_retry_after_is_heeded(tmp_path):
    waits: list[float] = []
    with teaching(after(1, TROUBLE["429"], good), tmp_path / "raw.jsonl") as (teacher, _):
        teacher._client._sleep = waits.append
        teacher.annotate("How?", LIST)
    assert waits == [7.0]


def test_a_timeout_is_no_verdict_and_the_row_is_done_later(tmp_path):
    raw = tmp_path / "raw.jsonl"
    with (
        teaching(sleepy(1.0), raw, timeout_s=0.1, max_attempts=2) as (teacher, server),
        pytest.raises(Unanswered, match="2 attempts"),
    ):
        teacher.annotate("How?", LIST)
    with teaching(good, raw) as (teacher, server):
        assert isinstance(teacher.annotate("How?", LIST), Annotation)
        assert len(server.requests) == 1


@contextmanager
def trickling(beginning: bytes) -> Iterator[tuple[str, list[str]]]:
    """An endpoint that sends this and then byte after byte, for eight seconds if it is let. Its
    address, and how each of its replies ended."""
    ends: list[str] = []
    closed = threading.Event()

    def answer(connection: socket.socket) -> None:
        try:
            connection.recv(1 << 20)
            connection.sendall(beginning)
            for _ in range(400):
                if closed.wait(0.02):
                    return
                connection.sendall(b"x")
            ends.append("all was sent")
        except OSError:
            ends.append("who asked has gone")

    def serve() -> None:
        while not closed.is_set():
            with suppress(TimeoutError):
                connection, _ = listening.accept()
                with connection:
                    answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", ends
        finally:
            closed.set()
            serving.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"


@pytest.mark.parametrize("beginning", [HEAD + b"X-Long: ", HEAD + b"\r\n{"], ids=["head", "body"])
def test_a_reply_that_trickles_in_is_given_up_when_its_time_is_over(tmp_path, beginning):
    with trickling(beginning) as (url, ends):
        endpoint = Endpoint("teacher-1", url, timeout_s=0.3, max_attempts=2)
        client = Client(endpoint, sleep=lambda _: None)
        with pytest.raises(Unanswered, match="2 attempts"):
            client.ask([{"role": "user", "content": "?"}])
        client.close()
        client.close()  # does nothing
        assert "all was sent" not in ends


def test_a_server_that_answers_half_the_rows_loses_none(tmp_path):
    """The other half gets 500s; a later run asks for just those."""

    def half(request, number):
        odd = int(answer_in(request)[0]) % 2
        return TROUBLE["500"](request, number) if odd else good(request, number)

    own = items(6)
    with teaching(half, tmp_path / "raw.jsonl", max_attempts=2, concurrency=3) as (teacher, server):
        report = annotate_into(tmp_path, own, teacher, checker())
        assert (len(report.annotated), report.num_left, report.exit_code) == (3, 3, 3)
    paid = {i.response for i in own[::2]}
    with teaching(good, tmp_path / "raw.jsonl", concurrency=3) as (teacher, server):
        report = annotate_into(tmp_path, own, teacher, checker())
        assert (len(report.annotated), report.num_left, report.exit_code) == (6, 0, 0)
        assert set(server.answers) == {i.response for i in own} - paid
    assert [row.response for row in report.annotated] == [i.response for i in own]


def test_an_endpoint_that_is_down_ends_the_run_soon(tmp_path):
    with teaching(TROUBLE["500"], tmp_path / "raw.jsonl", max_attempts=1) as (teacher, server):
        report = annotate_into(tmp_path, items(60), teacher, checker())
        assert len(server.requests) < 30
    assert "in a row" in report.stopped
    assert (report.num_left, report.exit_code) == (60, 3)
    assert not (tmp_path / "rejects.jsonl").read_bytes()


def test_a_wrong_model_or_key_ends_the_run_at_once_and_keeps_what_there_is(tmp_path):
    def wrong(*_):
        return 404, {"error": {"message": "no model of that name"}}, {}

    respond = after(2, good, wrong)
    with (
        teaching(respond, tmp_path / "raw.jsonl", concurrency=1) as (teacher, server),
        pytest.raises(InvalidInput, match=r"404.*no model of that name"),
    ):
        annotate_into(tmp_path, items(9), teacher, checker())
    assert len(server.requests) == 3
    assert len(read_rows(tmp_path / "annotated.jsonl", Annotated)) == 2


def test_a_request_that_is_refused_is_left_and_the_others_go_on(tmp_path):
    def long(request, number):
        if answer_in(request).startswith("1"):
            return 400, {"error": {"message": "context length exceeded"}}, {}
        return good(request, number)

    with teaching(long, tmp_path / "raw.jsonl") as (teacher, _):
        report = annotate_into(tmp_path, items(3), teacher, checker())
    assert (len(report.annotated), report.num_left) == (2, 1)
    assert "context length exceeded" in next(iter(report.unanswered))


# -- money -----------------------------------------------------------------------------------------

PRICES = {"price_in": 1000.0, "price_out": 10_000.0}
"""A reply of the server costs 2: 1000 tokens in and 100 out."""


def test_the_cap_stops_cleanly_and_counts_what_earlier_runs_spent(tmp_path):
    raw = tmp_path / "raw.jsonl"
    own = items(8)
    with teaching(good, raw, concurrency=1) as (teacher, _):
        messages = first_messages(own[0].prompt, own[0].response)
    options = PRICES | {"max_tokens": 200, "concurrency": 4}
    worst = (most_tokens(messages) * 1000 + 200 * 10_000) / 1e6
    with teaching(good, raw, max_cost=worst + 4.5, **options) as (teacher, server):
        report = annotate_into(tmp_path, own, teacher, checker())
        spent = teacher.ledger()
    assert len(report.annotated) == len(server.requests) == 3
    assert spent["total_cost"] == pytest.approx(6.0)
    assert spent["total_cost"] <= worst + 4.5
    assert (report.num_left, report.exit_code) == (5, 3)
    assert "cap" in report.stopped
    with teaching(good, raw, max_cost=worst + 4.5, **options) as (teacher, server):
        report = annotate_into(tmp_path, own, teacher, checker())
        assert server.requests == []
        assert teacher.ledger()["total_cost"] == pytest.approx(6.0)
    with teaching(good, raw, max_cost=worst + 20, **options) as (teacher, server):
        assert annotate_into(tmp_path, own, teacher, checker()).exit_code == 0
        assert len(server.requests) == 5
        assert teacher.ledger()["cost"] == pytest.approx(10.0)


def test_replies_without_counts_are_booked_with_bounds(tmp_path):
    def uncounted(request, number):
        status, body, headers = good(request, number)
        return status, {k: v for k, v in body.items() if k != "usage"}, headers

    with teaching(uncounted, tmp_path / "raw.jsonl", **PRICES, max_cost=1e6) as (teacher, _):
        teacher.annotate("How?", LIST)
        book = teacher.ledger()
    assert book["estimated"] == 1
    assert book["tokens_in"] > 1000
    assert book["total_cost"] > 0


def test_replies_without_text_that_are_asked_for_again_keep_to_the_cap(tmp_path):
    silent = 200, completion(None), {}
    options = PRICES | {"max_tokens": 200, "max_attempts": 20}
    with teaching(lambda *_: silent, tmp_path / "raw.jsonl", max_cost=20.0, **options) as pair:
        teacher, server = pair
        with pytest.raises(Exhausted, match="cap"):
            teacher.annotate("How?", LIST)
        assert 1 < len(server.requests) < 10
        assert teacher.ledger()["total_cost"] == pytest.approx(2.0 * len(server.requests))


@pytest.mark.parametrize("trouble", ["no text", "choices that are a number"])
def test_what_replies_without_text_cost_is_not_forgotten(tmp_path, trouble):
    """A later run counts it, for its ledger and for the cap."""
    raw = tmp_path / "raw.jsonl"
    options = PRICES | {"max_tokens": 200, "max_attempts": 2}
    for number in (1, 2):
        with teaching(TROUBLE[trouble], raw, **options) as (teacher, server):
            with pytest.raises(Unanswered, match="2 attempts"):
                teacher.annotate("How?", LIST)
            assert len(server.requests) == 2
            book = teacher.ledger()
        assert (book["cost"], book["total_cost"]) == pytest.approx((4.0, 4.0 * number))
        assert book["lost"] == 2
    assert [row.lost for row in read_rows(raw, RawReply)] == [1, 2, 3, 4]
    worst = (most_tokens(first_messages("How?", LIST)) * 1000 + 200 * 10_000) / 1e6
    with teaching(good, raw, max_cost=worst + 7.9, **options) as (teacher, server):
        with pytest.raises(Exhausted, match=r"\$8.0000 are spent"):
            teacher.annotate("How?", LIST)
        assert server.requests == []
    with teaching(good, raw, max_cost=worst + 8.1, **options) as (teacher, server):
        assert isinstance(teacher.annotate("How?", LIST), Annotation)
        assert teacher.ledger()["total_cost"] == pytest.approx(10.0)


def test_a_reply_with_neither_text_nor_counts_is_booked_with_bounds(tmp_path):
    bare = {k: v for k, v in completion(None).items() if k != "usage"}
    options = PRICES | {"max_tokens": 200, "max_attempts": 1}
    with (
        teaching(lambda *_: (200, bare, {}), tmp_path / "raw.jsonl", **options) as (teacher, _),
        pytest.raises(Unanswered),
    ):
        teacher.annotate("How?", LIST)
    (kept,) = read_rows(tmp_path / "raw.jsonl", RawReply)
    assert (kept.lost, kept.text, kept.tokens_in > 1000, kept.cost > 1) == (1, "", True, True)


NO_COUNTS = ["x", {"prompt_tokens": "many"}, {"prompt_tokens": -5, "completion_tokens": -7}, [1]]


@pytest.mark.parametrize("usage", NO_COUNTS, ids=str)
def test_counts_that_are_none_are_estimated(tmp_path, usage):
    def odd(request, number):
        status, body, headers = good(request, number)
        return status, body | {"usage": usage, "model": 7}, headers

    with teaching(odd, tmp_path / "raw.jsonl", **PRICES, max_cost=1e6) as (teacher, _):
        assert isinstance(teacher.annotate("How?", LIST), Annotation)
        book = teacher.ledger()
    assert book["estimated"] == 1
    assert book["tokens_in"] > 1000
    (kept,) = read_rows(tmp_path / "raw.jsonl", RawReply)
    assert kept.model is None


def test_a_cap_that_nothing_fits_is_told_before_anything_is_asked(tmp_path):
    with teaching(good, tmp_path / "raw.jsonl", **PRICES, max_cost=0.1) as (teacher, server):
        with pytest.raises(Exhausted, match="cap"):
            teacher.annotate("How?", LIST)
        assert server.requests == []


# -- secrets ---------------------------------------------------------------------------------------


def test_the_key_is_in_no_file_and_no_message(tmp_path, capfd):
    """Not even where the endpoint says it back, in a reply or in an error."""

    def leaking(request, number):
        if number == 0:
            return said(f"<annotated>{KEY}</annotated>")
        return 401, {"error": {"message": f"bad key {KEY}"}}, {}

    with (
        teaching(leaking, tmp_path / "raw.jsonl", concurrency=1) as (teacher, _),
        pytest.raises(InvalidInput, match=r"401.*\[key\]") as error,
    ):
        annotate_into(tmp_path, items(1), teacher, checker())
    assert KEY not in str(error.value)
    assert "[key]" in (tmp_path / "raw.jsonl").read_text(encoding="utf-8")
    shown = capfd.readouterr()
    files = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY in text for text in [*files, shown.out, shown.err])


@pytest.mark.parametrize("at", range(140, 205, 8))
def test_no_part_of_the_key_is_left_where_a_message_is_cut(tmp_path, at):
    def leaking(*_):
        return 401, {"error": {"message": "x" * at + KEY}}, {}

    with (
        teaching(leaking, tmp_path / "raw.jsonl") as (teacher, _),
        pytest.raises(InvalidInput, match="401") as error,
    ):
        teacher.annotate("How?", LIST)
    assert KEY[:4] not in str(error.value)


def test_the_key_is_not_kept_as_the_name_of_a_model(tmp_path):
    def leaking(request, number):
        status, body, headers = good(request, number)
        return status, body | {"model": f"m {KEY}"}, headers

    with teaching(leaking, tmp_path / "raw.jsonl") as (teacher, _):
        assert teacher.annotate("How?", LIST).details["model"] == "m [key]"
    assert KEY not in (tmp_path / "raw.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("key", ["schlüssel-123", "sk-123\nsk-456", "sk 123\x7f"])
def test_a_variable_that_holds_no_key_is_told_without_saying_it(monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(InvalidInput, match="OPENAI_API_KEY holds no key") as error:
        Client(Endpoint("m"))
    assert key not in str(error.value)
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    with pytest.raises(InvalidInput, match="OPENAI_API_KEY is not set"):
        Client(Endpoint("m"))


BAD_ENDPOINTS = {
    "begin with http": {"url": "localhost:8000/v1"},
    "timeout": {"timeout_s": float("inf")},
    "price": {"price_in": float("nan"), "price_out": 1.0, "max_cost": 1.0},
    "from 0 on": {"price_out": -1.0},
}


@pytest.mark.parametrize(("message", "values"), BAD_ENDPOINTS.items(), ids=list(BAD_ENDPOINTS))
def test_an_endpoint_that_cannot_work_is_refused_before_it_is_asked(message, values):
    with pytest.raises(InvalidInput, match=message):
        Endpoint("m", **values)


def test_a_question_that_no_request_can_hold_is_refused_at_once(tmp_path):
    with teaching(good, tmp_path / "raw.jsonl") as (teacher, server):
        with pytest.raises(Unanswered, match="surrogate"):
            teacher.annotate("How \ud800?", LIST)
        assert server.requests == []


def test_an_address_with_a_secret_in_it_is_refused():
    for url in ("http://me:pass@localhost/v1", "http://localhost/v1?key=1"):
        with pytest.raises(InvalidInput, match="OPENAI_API_KEY") as error:
            Endpoint("m", url)
        assert "pass" not in str(error.value)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tok")
    rows = [{"prompt": i.prompt, "response": i.response} for i in items(8)]
    write_rows(tmp_path / "rows.jsonl", [*rows, rows[0], {"prompt": "no response"}])
    return tmp_path


def command(url: str, *more: str) -> list[str]:
    return [
        "data", "annotate", "rows.jsonl", "--annotator", "teacher", "--model", "teacher-1",
        "--base-url", url, "--out", "out", "--tokenizer", "tok", "--json", *more,
    ]  # fmt: skip


def test_after_kill_9_the_same_command_finishes_without_paying_again(place):
    """The server answers four rows, then holds its replies: then the process is killed."""
    gate = threading.Event()

    def gated(request, number):
        if number >= 4:
            gate.wait(300)
        return good(request, number)

    with Server(gated) as server:
        running = subprocess.Popen(
            [STRETTO, *command(server.url, "--concurrency", "2")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ),
        )  # fmt: skip
        try:
            raw = place / "out" / "raw.jsonl"
            until(lambda: len(server.requests) == 6 and raw.read_bytes().count(b"\n") == 4)
        finally:
            running.send_signal(signal.SIGKILL)
            running.wait()
            gate.set()
        paid = {row.prompt_id for row in read_rows(raw, RawReply)}
        with raw.open("ab") as file:
            file.write(b'{"asked": "torn')
        before = server.answers.copy()
        again = subprocess.run(
            [STRETTO, *command(server.url, "--concurrency", "2")],
            capture_output=True, env=dict(os.environ), check=False,
        )  # fmt: skip
        result = json.loads(again.stdout)
        asked_again = {text for text, n in server.answers.items() if n > before[text]}
    assert again.returncode == 0, again.stderr
    assert (result["items"], result["annotated"], result["left"]) == (8, 8, 0)
    assert result["left_out"] == {"no response": 1, "repeated": 1}
    known = {i.response for i in items(8) if i.prompt_id in paid}
    assert len(known) == 4
    assert asked_again == {i.response for i in items(8)} - known
    rows = read_rows(place / "out" / "annotated.jsonl", Annotated)
    assert len({row.key for row in rows}) == 8
    assert json.loads((place / "out" / "ledger.json").read_bytes())["requests"] == 4


def until(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.02)
    pytest.fail("it did not happen in time")


def test_the_command_exits_with_3_for_rejects_and_names_them(place, capsys):
    def half(request, number):
        return said("nothing") if answer_in(request)[0] in "13" else good(request, number)

    with Server(half) as server:
        assert main(command(server.url)) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["reasons"] == {"no-annotated-text": 2}
    assert (result["annotated"], result["rejected"], result["left"]) == (6, 2, 0)
    rejects = read_rows(place / "out" / "rejects.jsonl", Reject)
    assert {r.prompt_id for r in rejects} == {items(4)[n].prompt_id for n in (1, 3)}


def test_raw_replies_are_read_again_without_paying_when_the_rows_are_removed(place, capsys):
    with Server(good) as server:
        assert main(command(server.url)) == 0
        (place / "out" / "annotated.jsonl").unlink()
        assert main(command(server.url)) == 0
        assert len(server.requests) == 8
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ledger"]["from_disk"] == 8


def test_the_cap_is_an_option_and_leaves_3(place, capsys):
    money = ["--price-in", "1000", "--price-out", "10000", "--max-tokens", "100"]
    with Server(good) as server:
        code = main(command(server.url, *money, "--cap", "14", "--concurrency", "1"))
    result = json.loads(capsys.readouterr().out)
    assert code == 3
    assert 0 < result["annotated"] < 8
    assert result["left"] == 8 - result["annotated"]
    assert "cap" in result["stopped"]
    assert result["ledger"]["total_cost"] == pytest.approx(2.0 * result["annotated"])
    assert result["ledger"]["total_cost"] <= 14


def test_ctrl_c_keeps_what_is_paid_and_leaves_130(place, capsys):
    def interrupting(request, number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return good(request, number)

    with Server(interrupting) as server:
        assert main(command(server.url, "--concurrency", "2")) == 130
        asked = len(server.requests)
    assert asked < 8
    result = json.loads(capsys.readouterr().out)
    assert result["annotated"] == asked
    assert result["stopped"] == "interrupted"


@pytest.mark.parametrize("concurrency", ["1", "3"])
def test_ctrl_c_is_heard_while_all_wait_to_ask_again(place, capsys, concurrency):
    def busy(request, number):
        if number == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return 429, {"error": {"message": "slow"}}, {"Retry-After": "20"}

    started = time.monotonic()
    with Server(busy) as server:
        assert main(command(server.url, "--concurrency", concurrency)) == 130
    assert time.monotonic() - started < 15
    result = json.loads(capsys.readouterr().out)
    assert (result["left"], result["stopped"]) == (8, "interrupted")


BAD = {
    "needs --model": ["--annotator", "teacher"],
    "needs the prices": ["--annotator", "teacher", "--model", "m", "--cap", "1"],
    "--cap must be above 0": ["--annotator", "teacher", "--model", "m", "--cap", "0"],
    "concurrency must be": ["--annotator", "teacher", "--model", "m", "--concurrency", "0"],
    "did you mean 'teacher'": ["--annotator", "techer"],
    "is no NAME=VALUE": ["--annotator", "structure", "--set", "x"],
    "structure has no --model": ["--annotator", "structure", "--model", "m"],
    "apar has no --base-url": ["--annotator", "apar", "--base-url", "http://localhost/v1"],
    "likelihood has no --cap": ["--annotator", "likelihood", "--cap", "1"],
    "no setting 'x'": ["--annotator", "structure", "--set", "x=1"],
    "it has none": ["--annotator", "teacher", "--model", "m", "--set", "client=1"],
    "--temperature must be": ["--annotator", "teacher", "--model", "m", "--temperature", "nan"],
    "NO_SUCH_KEY is not set": [
        "--annotator",
        "teacher",
        "--model",
        "m",
        "--key-env",
        "NO_SUCH_KEY",
    ],
}


@pytest.mark.parametrize(("message", "arguments"), BAD.items(), ids=list(BAD))
def test_what_cannot_work_is_told_on_one_line(place, capsys, message, arguments):
    code = main(
        ["data", "annotate", "rows.jsonl", "--out", "out", "--tokenizer", "tok", *arguments]
    )
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_goes_on_only_as_it_was_begun(place, capsys):
    with Server(good) as server:
        assert main(command(server.url, "--limit", "2")) == 0
        assert main([*command(server.url), "--temperature", "1"]) == 2
    assert "temperature 0.0, not 1.0" in capsys.readouterr().err
