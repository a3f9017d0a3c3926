"""Whatever JSON is sent, the answer is an answer or an OpenAI-style refusal: never a 5xx."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import CHAT, Served, serving
from tiny_lms import tiny_tokenizer

from stretto import LM
from stretto.server.schema import NEUTRAL, known_fields

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 40) | st.just(1 << 70) | st.floats() | st.text()
    | st.text(st.characters(categories=["Cs", "Ll", "Cc"]), max_size=5)
    | st.sampled_from(["user", "text", "sot", "auto", "window,budget=8", "tiny", "<sync/>"])
)  # fmt: skip
FIELDS = st.sampled_from([*known_fields(), *NEUTRAL, "nothing"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)
RAW = st.one_of(
    st.binary(max_size=40),
    st.integers(1, 30_000).map(lambda depth: b"[" * depth),
    st.integers(1, 30_000).map(lambda depth: b'{"a":' * depth),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = tiny_tokenizer()
    model = tiny_model(
        "llama", vocab_size=len(tokenizer), eos_token_id=None, max_position_embeddings=64
    )
    lm = LM.wrap(copy.deepcopy(model), tokenizer, dialect="pasta", name="tiny", pool_slots=4096)
    with serving(lm) as running:
        yield running


def check(served: Served, path: str, body: Any) -> None:
    status, _, answer = served.ask(path, body)
    assert status < 500, answer
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["message"]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    changes=st.dictionaries(FIELDS, VALUES, min_size=1, max_size=2),
    extension=st.none() | st.dictionaries(FIELDS, VALUES, max_size=2),
    is_chat=st.booleans(),
)
def test_no_field_brings_a_server_down(
    served: Served, changes: dict[str, Any], extension: Any, is_chat: bool
) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 3}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    body |= {} if extension is None else {"stretto": extension}
    check(served, CHAT if is_chat else "/v1/completions", body | changes)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=RAW | VALUES)
def test_no_body_brings_a_server_down(served: Served, body: Any) -> None:
    check(served, CHAT, body)


def test_slots_are_free_after_all_that(served: Served) -> None:
    served.check_idle()
