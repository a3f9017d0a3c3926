"""Every field there is, one by one, as OpenAI's own client sends it; and the table of the docs."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from forking import forking_lm
from serving import Served, serving

from stretto import SamplingParams
from stretto.params import BLOCK_FIELDS
from stretto.server.schema import (
    NEUTRAL,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    Extension,
    Message,
    StreamOptions,
)

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
HI: Any = [{"role": "user", "content": "hi"}]

COMMON: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.8,
    "n": 2,
    "stop": ["\x00", "zz"],
    "seed": 3,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False, "threads": True},
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "mine",
    "stretto": {},
}
CHAT = COMMON | {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        *HI,
        {"role": "assistant", "content": "yes"},
        *HI,
    ],
    "max_completion_tokens": 4,
    "logprobs": True,
    "response_format": {"type": "text"},
}
COMPLETION = COMMON | {"prompt": ["one", "two"], "logprobs": 0}
EXTENSION: dict[str, dict[str, Any]] = {
    "method": {"method": "sequential"},
    "budget": {"method": "window", "budget": 24},
    "pin_prompt": {"method": "window", "budget": 48, "pin_prompt": True},
    "page_tokens": {"method": "paged_h2o", "budget": 48, "page_tokens": 4},
    "sinks": {"method": "streaming_llm", "budget": 24, "sinks": 2},
    "reindexed": {"method": "streaming_llm", "budget": 24, "reindexed": True},
    "top_k": {"top_k": 5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "stop_ids": {"stop_ids": [40, 41]},
    "max_thread_tokens": {"max_thread_tokens": 4},
    "max_forks": {"max_forks": 1},
}
OF_BLOCKS = {*BLOCK_FIELDS, "variant", "convention"}
"""Fields of models that write blocks, which have tests of their own."""
REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 1},
    "metadata": {"a": "b"},
    "modalities": ["audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "service_tier": "flex",
    "store": True,
    "suffix": "x",
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_logprobs": 2,
    "verbosity": "low",
    "web_search_options": {},
}
SENT_WITH: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(forking_lm(max_positions=2048), max_tokens=6) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made


def ask(create: Any, **fields: Any) -> Any:
    """Fields that the client does not know go through its `extra_body`."""
    known = inspect.signature(create).parameters
    own = {name: value for name, value in fields.items() if name in known}
    rest = {name: value for name, value in fields.items() if name not in known}
    answer = create(model="forking", **own, extra_body=rest)
    return list(answer) if fields.get("stream") else answer


def test_no_field_is_left_out() -> None:
    assert {*CHAT, "model"} == set(ChatRequest.model_fields)
    assert {*COMPLETION, "model"} == set(CompletionRequest.model_fields)
    assert {*EXTENSION} | OF_BLOCKS == set(Extension.model_fields)
    assert {*CHAT["stream_options"]} == set(StreamOptions.model_fields)
    assert REFUSED.keys() == NEUTRAL.keys()


@pytest.mark.parametrize("name", CHAT)
def test_a_field_of_a_chat_is_taken(served: Served, client: Any, name: str) -> None:
    fields = {"messages": HI, **SENT_WITH.get(name, {}), name: CHAT[name]}
    answer = ask(client.chat.completions.create, **fields)
    last = answer[-1] if isinstance(answer, list) else answer
    assert last.choices or last.usage
    served.check_idle()


@pytest.mark.parametrize("name", COMPLETION)
def test_a_field_of_a_completion_is_taken(served: Served, client: Any, name: str) -> None:
    fields = {"prompt": "hi", **SENT_WITH.get(name, {}), name: COMPLETION[name]}
    answer = ask(client.completions.create, **fields)
    last = answer[-1] if isinstance(answer, list) else answer
    assert last.choices or last.usage
    served.check_idle()


@pytest.mark.parametrize("name", EXTENSION)
def test_a_field_of_the_extension_is_taken(served: Served, client: Any, name: str) -> None:
    extension = EXTENSION[name]
    answer = ask(client.chat.completions.create, messages=HI, stretto=extension)
    details = answer.choices[0].stretto
    assert details["method"].startswith(extension.get("method", "pasta"))
    served.check_idle()


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(client: Any, name: str, is_chat: bool) -> None:
    create = client.chat.completions.create if is_chat else client.completions.create
    fields: dict[str, Any] = {"messages": HI} if is_chat else {"prompt": "hi"}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(create, **fields, **{name: REFUSED[name]})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    for value in NEUTRAL[name]:
        assert ask(create, **fields, max_tokens=1, **{name: value}).choices


EFFECTS: dict[str, Any] = {
    "top_p": 0.2,
    "top_k": 2,
    "repetition_penalty": 1.8,
    "stop_ids": [],  # one that is drawn
    "max_thread_tokens": 3,
    "max_forks": 0,
}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_field_changes_the_answer_as_in_the_library(
    served: Served, client: Any, name: str
) -> None:
    params: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0, "seed": 11}
    (plain,) = served.lm.generate(HI, SamplingParams(**params))
    value = EFFECTS[name] if name != "stop_ids" else [plain.trace.segments[1].tokens[2]]
    changed = {name: frozenset(value) if name == "stop_ids" else value}
    (expected,) = served.lm.generate(HI, SamplingParams(**params, **changed))
    own = {"top_p": value} if name == "top_p" else {"stretto": {name: value}}
    answer = ask(client.chat.completions.create, messages=HI, **params, **{"stretto": {}, **own})
    choice = answer.choices[0]
    assert expected.annotated != plain.annotated
    assert choice.message.content == expected.text
    assert [t["text"] for t in choice.stretto["threads"]] == [t.text for t in expected.threads]


def test_max_tokens_by_either_name(client: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(client.chat.completions.create, messages=HI, **{name: 3})
        assert answer.usage.completion_tokens + answer.usage.control_tokens <= 3


def test_the_page_has_every_field() -> None:
    page = PAGE.read_text(encoding="utf-8")
    words = set(re.findall(r"`([a-z_]+)`", page)) | set(re.findall(r"([a-z_]+)\.[a-z_]+`", page))
    fields = {
        *ChatRequest.model_fields, *CompletionRequest.model_fields, *Extension.model_fields,
        *UNSUPPORTED, *Message.model_fields,
    }  # fmt: skip
    assert fields <= words, fields - words
    table = page.partition("| refused |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| (`.+?`) \| (.*?) \|$", table, re.MULTILINE))
    told = {name: value for names, value in rows.items() for name in re.findall(r"`(\w+)`", names)}
    assert set(told) == set(NEUTRAL)
    for name, values in NEUTRAL.items():
        shown = re.findall(r"`(.+?)`", told[name].partition(";")[0])
        assert [json.loads(value) for value in shown] == list(values), name


def test_the_client_has_no_field_that_we_do_not_know() -> None:
    own = {"self", "timeout", "extra_headers", "extra_query", "extra_body"}
    of_chat = inspect.signature(openai.resources.chat.completions.Completions.create)
    of_text = inspect.signature(openai.resources.completions.Completions.create)
    assert {*of_chat.parameters} - own <= {*ChatRequest.model_fields, *NEUTRAL}
    assert {*of_text.parameters} - own <= {*CompletionRequest.model_fields, *NEUTRAL}


@pytest.mark.parametrize(
    ("is_chat", "fields", "param", "hint"),
    [
        (True, {"top_k": 5}, "top_k", "pass it as stretto.top_k"),
        (False, {"repetition_penalty": 1.1}, "repetition_penalty", "stretto.repetition_penalty"),
        (True, {"include_usage": True}, "include_usage", "pass it as stream_options.include_usage"),
        (True, {"prompt": "hi"}, "prompt", "/v1/completions has it"),
        (False, {"messages": HI}, "messages", "/v1/chat/completions has it"),
        (True, {"stretto": {"seed": 1}}, "stretto.seed", "pass it beside stretto, not in it"),
        (True, {"min_p": 0.1}, "min_p", "leave it out"),
    ],
)
def test_a_field_in_the_wrong_place_is_told_where_it_belongs(
    client: Any, is_chat: bool, fields: dict[str, Any], param: str, hint: str
) -> None:
    create = client.chat.completions.create if is_chat else client.completions.create
    own: dict[str, Any] = {"messages": HI} if is_chat else {"prompt": "hi"}
    with pytest.raises(openai.BadRequestError, match=f"unknown field {param}; .*{hint}") as caught:
        create(model="forking", **own, extra_body=fields)
    assert (caught.value.param, caught.value.code) == (param, "unknown_parameter")


def test_the_clients_own_helper_reads_a_stream(client: Any) -> None:
    settings: dict[str, Any] = {
        "model": "forking", "messages": HI, "max_tokens": 30, "seed": 4, "logprobs": True,
    }  # fmt: skip
    whole = client.chat.completions.create(**settings)
    with client.chat.completions.stream(**settings) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_what_a_clients_parser_asks_for_is_refused(client: Any) -> None:
    class Point(pydantic.BaseModel):
        x: int

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.parse(model="forking", messages=HI, response_format=Point)
    assert caught.value.param == "response_format.type"
