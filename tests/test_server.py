"""The server as OpenAI's own client meets it: every field, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from forking import forking_lm
from serving import CHAT, PROMISE, SYNC, TAGS, Served, play, read_along, scripted, serving
from tiny_lms import tiny_lm

from stretto import SamplingParams
from stretto.errors import InvalidInput
from stretto.server import Settings
from stretto.server.settings import check_address, is_loopback, keys_from

HI: Any = [{"role": "user", "content": "hi"}]
STORY = {
    "main": ["Zwei: ", PROMISE, ", ", PROMISE, ".", SYNC, " Ende 👩‍👩‍👧!"],
    "main.1": ["日本語 Straße"],
    "main.2": ["b STOP c"],
}
TOLD = "Zwei: 日本語 Straße, b STOP c. Ende 👩‍👩‍👧!"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(forking_lm(max_positions=2048)) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made


def test_a_chat_is_answered_as_the_library_answers_it(served: Served, client: Any) -> None:
    lm = served.lm
    answer = client.chat.completions.create(
        model="forking", messages=HI, max_tokens=60, temperature=1, top_p=0.9, seed=4, n=2,
        stop=["\x00never"], user="me", response_format={"type": "text"},
    )  # fmt: skip
    params = SamplingParams(max_tokens=60, temperature=1, top_p=0.9, seed=4)
    alone = lm.generate(HI, params, n=2)
    assert [c.message.content for c in answer.choices] == [a.text for a in alone]
    assert [c.finish_reason for c in answer.choices] == [a.finish_reason for a in alone]
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
    assert answer.usage.control_tokens == sum(a.usage.control_tokens for a in alone)
    served.check_idle()


def test_a_stream_adds_up_to_the_whole_answer(served: Served, client: Any) -> None:
    settings: Any = {
        "model": "forking", "messages": HI, "max_tokens": 80, "temperature": 1, "seed": 9, "n": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**settings)
    chunks = list(
        client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
    served.check_idle()


@pytest.mark.parametrize("stop", [None, "STOP", [" c. E", "zzz"], "👩‍👩‍👧!", "Zwei", "ße, b"])
def test_threads_are_released_in_document_order(served: Served, client: Any, stop: Any) -> None:
    told = TOLD
    for end in [stop] if isinstance(stop, str) else stop or []:
        told = told.partition(end)[0]
    with scripted(served.lm, play(served.lm, STORY)):
        settings: Any = {
            "model": "forking", "messages": HI, "max_tokens": 500, "temperature": 0, "stop": stop,
            "logprobs": True,
        }  # fmt: skip
        whole = client.chat.completions.create(**settings).choices[0]
        chunks = list(client.chat.completions.create(**settings, stream=True))
    pieces = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(pieces) == whole.message.content == told
    assert not any(tag in piece for piece in pieces for tag in TAGS)
    assert "\ufffd" not in "".join(pieces)
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert tokens == whole.logprobs.content
    assert "".join(t.token for t in tokens) == told
    assert bytes(b for t in tokens for b in t.bytes).decode() == told
    assert all(t.logprob <= 0 for t in tokens)
    served.check_idle()


def test_text_comes_as_early_as_document_order_allows(served: Served, client: Any) -> None:
    story = {"main": ["a", PROMISE, "b" * 30, PROMISE, SYNC, "z"], "main.1": ["12345678"] * 2}
    with scripted(served.lm, play(served.lm, story | {"main.2": ["."]})), read_along(served.lm):
        stream = client.chat.completions.create(
            model="forking", messages=HI, max_tokens=200, stream=True
        )
        pieces = [c.choices[0].delta.content for c in stream if c.choices[0].delta.content]
    assert pieces[0] == "a"
    assert len([p for p in pieces if p.isdigit()]) > 4  # the child's text, while main goes on
    assert "".join(pieces) == "a" + "12345678" * 2 + "b" * 30 + ".z"


def test_thread_events_tell_what_the_page_draws(served: Served, client: Any) -> None:
    with scripted(served.lm, play(served.lm, STORY)):
        stream = client.chat.completions.create(
            model="forking", messages=HI, max_tokens=500, stream=True,
            stream_options={"threads": True, "include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
    parts = [c.stretto for c in chunks if "stretto" in (c.model_extra or {})]
    events = [event for part in parts for event in part.get("events", [])]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "thread_start"
    assert kinds[-2:] == ["usage", "done"]
    assert {"thread_start", "token", "thread_end", "join", "step"} <= set(kinds)
    assert events[-1]["text"] == TOLD
    written = {e["thread"]: "" for e in events if e["type"] == "thread_start"}
    for event in events:
        if event["type"] in ("token", "thread_end"):
            written[event["thread"]] += event["text"]
    assert written == {
        "main": "Zwei: , . Ende 👩‍👩‍👧!",
        "main.1": "日本語 Straße",
        "main.2": "b STOP c",
    }
    steps = [event for event in events if event["type"] == "step"]
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    forked = [s for s in steps if "main.1" in s["live"]][-1]
    assert forked["live"].keys() == {"main", "main.1"}
    assert forked["live"]["main.1"] < forked["dense_tokens"]
    assert forked["held_slots"] <= forked["dense_tokens"]
    details = next(part["details"] for part in parts if "details" in part)
    assert [t["id"] for t in details["threads"]] == ["main", "main.1", "main.2"]
    assert details["usage"]["control_tokens"] == chunks[-1].usage.control_tokens


def test_completions_take_text_as_it_is(served: Served, client: Any) -> None:
    settings: Any = {
        "model": "forking", "prompt": ["one", "two"], "max_tokens": 30, "temperature": 1,
        "seed": 3, "n": 2, "logprobs": 0,
    }  # fmt: skip
    whole = client.completions.create(**settings)
    params = SamplingParams(max_tokens=30, temperature=1, seed=3)
    alone = served.lm.generate(["one", "two"], params, n=2, raw=True)
    assert [c.text for c in whole.choices] == [a.text for a in alone]
    assert whole.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone[::2])
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        starts = [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
        assert logprobs.text_offset == starts
    texts = [""] * 4
    for chunk in client.completions.create(**settings, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in whole.choices]


def test_the_extension_chooses_method_and_limits(served: Served, client: Any) -> None:
    def ask(**extension: Any) -> Any:
        settings: Any = {"model": "forking", "messages": HI, "max_tokens": 60, "seed": 2}
        choice = client.chat.completions.create(
            **settings, extra_body={"stretto": extension}
        ).choices[0]
        return choice.message.content, choice.stretto

    text, details = ask(method="sequential", top_k=5)
    assert details["method"] == "sequential"
    assert details["seed"] == 2
    assert len(details["threads"]) == 1
    params = SamplingParams(max_tokens=60, temperature=1, seed=2, top_k=5)
    assert text == served.lm.generate("hi", params, method="sequential")[0].text
    assert len(ask(max_forks=0)[1]["threads"]) == 1
    assert ask(method="streaming_llm", budget=24)[1]["live_kv"]["peak"] <= 25


def test_without_a_seed_answers_differ(served: Served, client: Any) -> None:
    settings: Any = {"model": "forking", "prompt": "hi", "max_tokens": 1}
    settings["extra_body"] = {"stretto": {}}
    answers = [client.completions.create(**settings).choices[0] for _ in range(3)]
    assert len({answer.stretto["seed"] for answer in answers}) == 3


def test_models_and_operation(served: Served, client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "forking"
    assert model.stretto["methods"][0] == "pasta"
    assert client.models.retrieve("forking") == model
    assert served.ask("/health")[::2] == (200, {"status": "ok"})
    assert served.ask("/ready")[::2] == (200, {"status": "ready", "model": "forking"})
    status, headers, text = served.ask("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b"stretto_pool_free_slots 8192.0" in text
    for name in (b"forward_seconds", b"event_loop_cpu_seconds", b"preemptions"):
        assert b"# TYPE stretto_%b_total counter" % name in text
    assert b'stretto_http_requests_total{method="GET",path="/health",status="200"}' in text


BAD: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"model": "other"}, 404, "model", "'forking' is"),
    ({"temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
    ({"tools": [{"type": "function"}]}, 400, "tools", "not supported"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "repetition_penalty"),
    ({"logprobs": True, "top_logprobs": 3}, 400, "top_logprobs", "drawn"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format.type", "'text'"),
    ({"stretto": {"method": "sott"}}, 400, "method", "did you mean 'sot'"),
    ({"stretto": {"methd": "sot"}}, 400, "stretto.methd", "did you mean 'method'"),
    ({"stretto": {"method": "window"}}, 400, "method", "budget"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": "5"}, 400, "max_tokens", "integer"),
    ({"max_completion_tokens": 5}, 400, "max_completion_tokens", "the same"),
    ({"temperature": -1}, 400, "temperature", "-1"),
    ({"top_p": 0}, 400, "top_p", "above 0"),
    ({"n": 0}, 400, "n", "greater"),
    ({"stop": [""]}, 400, "stop", "empty"),
    ({"stop": 5}, 400, "stop", "valid"),
    ({"messages": []}, 400, "messages", "at least 1"),
    ({"messages": [{"role": "bot", "content": "x"}]}, 400, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": " "}]}, 400, None, "empty"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "surrogate"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400, "messages[0].content[0].type", "'text'",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "name": "me"}]},
        400, "messages[0].name", "not supported",
    ),
    ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "messages", "2048 positions"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "param", "message"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name(
    served: Served, change: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    got, _, body = served.ask(CHAT, served.chat() | change)
    assert got == status, body
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param, body
    assert message in body["error"]["message"], body
    served.check_idle()


def test_what_asks_for_nothing_is_accepted(served: Served) -> None:
    nothing: dict[str, Any] = {
        "tools": [], "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "store": False, "seed": None, "stop": None, "top_logprobs": None, "logprobs": False,
    }  # fmt: skip
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None}
    messages = [{"role": "user", "content": parts}, said, *HI]
    status, _, body = served.ask(CHAT, served.chat(messages=messages, **nothing))
    assert status == 200, body


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        ((CHAT, b"{", {}), 400, "not JSON"),
        ((CHAT, b"[" * 100_000, {}), 400, "body"),
        ((CHAT, b"", {}), 400, "body"),
        ((CHAT, b"[]", {}), 400, "JSON object"),
        ((CHAT, b"{}", {"Content-Type": "text/plain"}), 400, "Content-Type"),
        ((CHAT, b"{}", {}), 400, "is missing"),
        ((CHAT, b'{"seed": ' + b"1" * 5000 + b"}", {}), 400, ""),
        ((CHAT, b"\xff\xfe{", {}), 400, ""),
        ((CHAT, None, {}), 405, "not allowed"),
        (("/v1/nothing", None, {}), 404, "not found"),
        (("/nothing", None, {}), 404, "not found"),
        (("/v1/models/nothing", None, {}), 404, "nothing"),
    ],
)
def test_whatever_is_sent_gets_an_openai_style_body(
    served: Served, sent: tuple[str, Any, Any], status: int, message: str
) -> None:
    got, _, answer = served.ask(*sent)
    assert got == status, answer
    assert message in answer["error"]["message"], answer


def test_keys_open_the_api_and_are_nowhere_told(caplog: pytest.LogCaptureFixture) -> None:
    with serving(tiny_lm(), keys=("right-key-1", "right-key-2")) as served:
        for given in (None, "Bearer wrong-key", "right-key-1", "Basic right-key-1"):
            headers = {} if given is None else {"Authorization": given}
            for path, body in ((CHAT, b"{"), ("/v1/models", None), ("/metrics", None)):
                status, _, answer = served.ask(path, body, headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert "right-key" not in json.dumps(answer)
        assert served.ask("/health")[0] == 200
        with served.client("right-key-2") as client:
            assert client.models.list().data
            assert client.chat.completions.create(**served.chat()).choices
        with served.client("wrong-key") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        schema = served.ask("/openapi.json")[2]
        assert schema["paths"][CHAT]["post"]["security"] == [{"key": []}]
    assert "right-key" not in caplog.text
    assert "right-key" not in repr(Settings(keys=("right-key-1",)))


def test_what_one_key_asks_is_not_told_to_another() -> None:
    keys = ("right-key-1", "right-key-2")
    with serving(tiny_lm(prefix_cache=True), keys=keys) as served:

        def cached(key: str) -> int:
            asked = served.chat("The launch code is 0000.", temperature=0, max_tokens=2)
            status, _, body = served.ask(CHAT, asked, {"Authorization": f"Bearer {key}"})
            assert status == 200
            return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

        first, again, other, other_again = (cached(key) for key in keys for _ in range(2))
    assert [first, other] == [0, 0]
    assert again == other_again > 20


def test_pages_of_other_origins_and_hosts_are_kept_out() -> None:
    with serving(tiny_lm(), hosts=("localhost", "127.0.0.1")) as served:
        _, headers, _ = served.ask("/v1/models", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in headers
        assert served.ask("/v1/models", headers={"Host": "localhost:1"})[0] == 200
        status, _, body = served.ask("/v1/models", headers={"Host": "rebound.example"})
        assert (status, body["error"]["code"]) == (421, "unknown_host")
    with serving(tiny_lm(), cors_origins=("https://mine.example",)) as served:
        _, headers, _ = served.ask("/v1/models", headers={"Origin": "https://mine.example"})
        assert headers["access-control-allow-origin"] == "https://mine.example"


def test_the_schema_is_complete(served: Served) -> None:
    schema = served.ask("/openapi.json")[2]
    text = json.dumps(schema)
    parts = schema["components"]["schemas"]
    for name in {ref.split('"')[0] for ref in text.split("#/components/schemas/")[1:]}:
        assert name in parts
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["200"]["content"], path
    fields = parts["ChatRequest"]["properties"]
    assert {"messages", "stretto", "stop", "n", "stream_options"} <= set(fields)
    assert parts["ChatRequest"]["additionalProperties"] is False


def test_the_app_may_be_mounted_in_another() -> None:
    from fastapi import FastAPI

    from stretto.server import create_app

    lm = tiny_lm()
    inner = create_app(lm, Settings(keys=("right-key-1",)))
    outer = FastAPI()
    outer.mount("/llm", inner)

    async def ask(headers: list[tuple[bytes, bytes]]) -> int:
        body = {"model": lm.name, "messages": HI, "max_tokens": 3}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        sent: list[Any] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.sleep(3600)

        async def send(message: Any) -> None:
            sent.append(message)

        path = "/llm" + CHAT
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [(b"content-type", b"application/json"), *headers],
            "root_path": "", "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"},
            "server": ("test", 80), "client": ("test", 1), "state": {},
        }  # fmt: skip
        await outer(scope, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(ask([])) == 401
    assert asyncio.run(ask([(b"authorization", b"Bearer right-key-1")])) == 200
    inner.state.engine.close()


def test_addresses_and_keys() -> None:
    assert keys_from({"STRETTO_API_KEYS": " key-one-1, key-two-2\n"}) == ("key-one-1", "key-two-2")
    assert keys_from({}) == ()
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match="STRETTO_API_KEYS"):
        check_address("0.0.0.0", (), allow_open=False)
    check_address("0.0.0.0", ("key-one-1",), allow_open=False)
    check_address("0.0.0.0", (), allow_open=True)
    with pytest.raises(InvalidInput, match="API key 2") as caught:
        Settings(keys=("key-one-1", "short"))
    assert "short" not in str(caught.value)
