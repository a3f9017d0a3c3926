"""How the body of a request is read, which is ours to do, and what the schema tells of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from serving import CHAT, Served, serving
from tiny_lms import tiny_lm

from stretto.runtime.events import Denoised, Done, Event, Joined, ThreadEnd, Token, Usage, to_json
from stretto.server.route import is_json

TEXT = "/v1/completions"
JSON = "application/json"
MISSING = ("the body is missing", "invalid_value")
NO_OBJECT = (
    "the body must be a JSON object, sent with Content-Type: application/json", "invalid_value",
)  # fmt: skip
NO_JSON = (
    "the body is not JSON: Expecting property name enclosed in double quotes", "invalid_json",
)  # fmt: skip
UNREADABLE = ("There was an error parsing the body", None)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_lm(), max_tokens=2) as running:
        yield running


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        (JSON, b"", MISSING),
        ("text/plain", b"", MISSING),
        (JSON, b"{", NO_JSON),
        ("application/x+json; charset=utf-8", b"{", NO_JSON),
        (JSON, b"{} {}", ("the body is not JSON: Extra data", "invalid_json")),
        ("text/plain", b"{", NO_OBJECT),
        ("", b"{}", NO_OBJECT),
        ("application/x-www-form-urlencoded", b"{}", NO_OBJECT),
        (JSON, b"null", NO_OBJECT),
        (JSON, b"5", NO_OBJECT),
        (JSON, b"[{}]", NO_OBJECT),
        (JSON, b"\xff\xfe{", UNREADABLE),
        (JSON, b"[" * 90_000, UNREADABLE),
        (JSON, b'{"seed": ' + b"1" * 5000 + b"}", UNREADABLE),
    ],
)
def test_what_is_no_body_is_told(
    served: Served, path: str, kind: str, body: bytes, told: tuple[str, str | None]
) -> None:
    status, headers, answer = served.ask(path, body, {"Content-Type": kind})
    message, code = told
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    assert (status, answer) == (400, {"error": error})
    assert headers["content-type"] == JSON


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"tools": [1]}, "tools", "unsupported_parameter"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
        ({"max_tokens": 5.0}, "max_tokens", "invalid_value"),
        ({"stretto": 5}, "stretto", "invalid_value"),
        ({"model": None}, "model", "invalid_value"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    served: Served, path: str, change: dict[str, Any], param: str, code: str
) -> None:
    body = served.chat() if path == CHAT else {"model": served.lm.name, "prompt": "hi"}
    assert served.ask(path, body)[0] == 200
    status, _, answer = served.ask(path, body | change)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)


def test_what_json_is_called() -> None:
    yes = (
        JSON,
        "application/JSON",
        " application/json ; x=y",
        "application/vnd.x+json",
        f"{JSON};",
    )
    no = (
        "",
        "json",
        "text/json",
        "application/",
        f"{JSON}/",
        f"{JSON}, {JSON}",
        "application/jsonx",
    )
    assert [is_json(kind) for kind in yes] == [True] * len(yes)
    assert [is_json(kind) for kind in no] == [False] * len(no)


def test_the_schema_tells_of_requests_and_answers(served: Served) -> None:
    schema = served.ask("/openapi.json")[2]
    for path, request, answer in (
        (CHAT, "ChatRequest", "ChatAnswer"),
        (TEXT, "CompletionRequest", "TextAnswer"),
    ):
        told = schema["paths"][path]
        assert told.keys() == {"post"}
        body = told["post"]["requestBody"]
        assert body["required"] is True
        place = "#/components/schemas/"
        assert body["content"][JSON]["schema"]["$ref"] == place + request
        contents = told["post"]["responses"]["200"]["content"]
        assert contents[JSON]["schema"]["$ref"] == place + answer
        assert "text/event-stream" in contents
        assert {"400", "401", "404", "413", "429", "500", "503"} < told["post"]["responses"].keys()
        assert {"model", "stretto"} < schema["components"]["schemas"][request]["properties"].keys()


EVENTS: tuple[Event, ...] = (
    Token("main", 0, 5, "é", False, "sampled", 3, 1, -0.5, 1),
    ThreadEnd("main.1", "stop", "", 4),
    Joined("main", ("main.1", "main.2"), 5),
    Denoised("main.1", 2, 0, 3, (0, 2), (7, 8), 1, 2),
    Usage({"prompt_tokens": 3}),
    Done("text", "stop"),
)


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_told_whole_and_its_type_first(event: Event) -> None:
    told = to_json(event)
    assert told == {"type": event.type, **asdict(event)}
    assert next(iter(told)) == "type"
    assert json.loads(json.dumps(told)).keys() == told.keys()
