"""What schemathesis makes of the OpenAPI schema: requests that it allows, as answers promise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import tiny_model
from hypothesis import HealthCheck, Phase, given, settings
from serving import Served, serving
from tiny_lms import tiny_tokenizer

from stretto import LM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, and its dependencies'
    schemathesis = pytest.importorskip("schemathesis")
    pytest.importorskip("schemathesis.checks")

PATHS = {
    "POST /v1/chat/completions": 40,
    "POST /v1/completions": 40,
    "GET /v1/models": 1,
    "GET /v1/models/{model}": 5,
    "GET /health": 1,
    "GET /ready": 1,
    "GET /metrics": 1,
}
"""Examples of each."""
NEEDED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = tiny_tokenizer()
    model = tiny_model(
        "llama", vocab_size=len(tokenizer), eos_token_id=None, max_position_embeddings=64
    )
    lm = LM.wrap(copy.deepcopy(model), tokenizer, dialect="pasta", name="tiny", pool_slots=4096)
    with serving(lm, max_tokens=3, max_requests=1000) as running:
        yield running


def narrowed(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Every other body keeps one of its fields, and a text that is one: many fields at once nearly
    always have a value that is refused, and nothing would be decoded."""
    if number % 2 == 0:
        return body
    names = sorted(set(body) - {"model", *NEEDED})
    kept = {names[number // 2 % len(names)]} if names else set()
    return {k: NEEDED.get(k, v) for k, v in body.items() if k in kept | NEEDED.keys()}


@pytest.fixture(scope="module")
def operations(served: Served) -> dict[str, Any]:
    schema = schemathesis.openapi.from_dict(served.app.openapi())
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


def test_all_operations_are_tried(operations: dict[str, Any]) -> None:
    assert {label.replace(":path", "") for label in operations} == set(PATHS)


@pytest.mark.parametrize("label", PATHS)
@pytest.mark.filterwarnings("ignore")
def test_the_schema_is_kept(served: Served, operations: dict[str, Any], label: str) -> None:
    """No 5xx; statuses and bodies are those that the schema promises."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        response_schema_conformance,
        status_code_conformance,
    )

    statuses: list[int] = []

    @settings(
        max_examples=PATHS[label], deadline=None, database=None, derandomize=True,
        phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operations[label].as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = narrowed(case.body, len(statuses)) | {"model": "tiny"}
        response = case.call(base_url=f"http://127.0.0.1:{served.port}", timeout=30)
        statuses.append(response.status_code)
        case.validate_response(
            response,
            checks=[not_a_server_error, status_code_conformance, response_schema_conformance],
        )

    run()
    assert len(statuses) >= PATHS[label]
    assert 200 in statuses or "{" in label, statuses
    served.check_idle()


@pytest.mark.parametrize(
    ("path", "name"), [("chat/completions", "messages"), ("completions", "prompt")]
)
@pytest.mark.filterwarnings("ignore")
def test_events_of_a_stream_are_as_the_schema_has_them(
    served: Served, operations: dict[str, Any], path: str, name: str
) -> None:
    from schemathesis.specs.openapi.checks import response_schema_conformance

    body = {"model": "tiny", "stream": True, name: NEEDED[name]}
    case = operations[f"POST /v1/{path}"].Case(body=body, media_type="application/json")
    response = case.call(base_url=f"http://127.0.0.1:{served.port}", timeout=30)
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response, checks=[response_schema_conformance])
