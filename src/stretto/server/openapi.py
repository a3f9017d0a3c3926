"""What the OpenAPI schema says of answers; what it says of requests comes from `schema`."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

DESCRIPTION = (
    "OpenAI's API over a self-orchestrating language model: several threads of one answer decode "
    "at once. Fields beyond OpenAI's are under `stretto` and `stream_options.threads`."
)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every answer that is none."""

    error: ErrorDetail


class PromptTokens(BaseModel):
    """`cached_tokens`: not computed, since an earlier prompt began with them."""

    cached_tokens: int


class Usage(BaseModel):
    """`completion_tokens`: drawn tokens with a character in the text, each once. `control_tokens`:
    drawn annotations. `cut_tokens`: text that a stop string cut off. `total_tokens` leaves the
    last two out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    control_tokens: int
    cut_tokens: int


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stretto: dict[str, Any] | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stretto: dict[str, Any] | None = None


class TextAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ModelDetails(BaseModel):
    dialect: str
    methods: list[str]
    engine: str
    context_length: int
    pool_slots: int
    has_chat_template: bool


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    stretto: ModelDetails


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok"]


class Ready(BaseModel):
    status: Literal["ready"]
    model: str


Responses = dict[int | str, dict[str, Any]]


def _errors(*statuses: int) -> Responses:
    what = {
        400: "asked for wrongly; `param` names the field",
        401: "no key, or a wrong one",
        404: "no such model",
        408: "the body came too slowly",
        413: "the body is too large, or has too many parts",
        429: "too many requests are under way; see Retry-After",
        500: "decoding failed, or the engine has stopped",
        503: "shutting down",
        504: "the deadline has passed",
    }
    return {status: {"model": Error, "description": what[status]} for status in statuses}


def answers(kind: str, shape: Literal["chat", "text"]) -> Responses:
    """The answers of a path that decodes."""
    data = {"type": "string", "description": f"JSON, a chunk of a {kind} or an error; then [DONE]"}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    whole: dict[str, Any] = {
        "model": ChatAnswer if shape == "chat" else TextAnswer,
        "description": "the answer, whole or as a stream of chunks",
        "content": {"text/event-stream": {"schema": event}},
    }
    return {200: whole, **_errors(400, 401, 404, 408, 413, 429, 500, 503, 504)}


MODELS: Responses = {200: {"model": Models}, **_errors(401)}
MODEL: Responses = {200: {"model": Model}, **_errors(401, 404)}
HEALTH: Responses = {200: {"model": Health}, **_errors(500)}
READY: Responses = {200: {"model": Ready}, **_errors(500, 503)}
METRICS: Responses = {
    200: {
        "description": "Prometheus's text format",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    },
    **_errors(401),
}


def install(app: FastAPI, *, has_keys: bool) -> None:
    """Makes the application's schema its own: what is malformed is a 400, not FastAPI's 422."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            parts = made["components"]
            for name in ("HTTPValidationError", "ValidationError"):
                parts["schemas"].pop(name, None)
            for operation in (o for path in made["paths"].values() for o in path.values()):
                operation["responses"].pop("422", None)
                if has_keys and 401 in map(int, operation["responses"]):
                    operation["security"] = [{"key": []}]
            if has_keys:
                parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]
