"""Errors on the wire: a status and OpenAI's body, always."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from stretto.errors import InvalidInput, PromptTooLong
from stretto.server import schema

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MAX_ECHO = 500
"""Characters of a message: what a client sent is not sent back in full."""
UNIONS = ("content", "stop", "prompt")
"""Fields of several types; pydantic puts the type it tried after them in the place of an error."""


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(message)
        self.param = None if param is None else _cut(param)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status)
        if kind is None:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ECHO else f"{text[: MAX_ECHO - 1]}…"


def queue_full(num: int, under_way: int, limit: int, retry_after_s: int) -> ApiError:
    """`num` more samples would be more than the `limit`."""
    several = "" if num == 1 else " for a request of several"
    return ApiError(
        429,
        f"{under_way} samples are under way and {num} more asked for, which is over the limit of "
        f"{limit}{several}; try again in {retry_after_s} s",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def shutting_down(retry_after_s: int = 5) -> ApiError:
    return ApiError(
        503,
        "the server is shutting down; try again later",
        code="shutting_down",
        headers={"Retry-After": str(retry_after_s)},
    )


def stopped() -> ApiError:
    return ApiError(500, "the engine has stopped; the server must be started anew", code="stopped")


def too_late(deadline_s: float) -> ApiError:
    """The header tells OpenAI's clients not to ask for the same again at once."""
    return ApiError(
        504,
        f"the answer took longer than {deadline_s:g} s; ask for fewer tokens",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
    )


def of_input(error: InvalidInput) -> ApiError:
    """A refusal by the runtime; it names the field where its message begins with one."""
    message = str(error)
    if isinstance(error, PromptTooLong):
        return ApiError(400, message, param="messages", code="context_length_exceeded")
    first = message.removeprefix("unknown ").split(" ", 1)[0]
    known = {*schema.ChatRequest.model_fields, *schema.Extension.model_fields}
    return ApiError(400, message, param=first if first in known else None, code="invalid_value")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found, as one error: the most specific, that is, the deepest one."""
    error = max(errors, key=lambda e: len(e["loc"]))
    path = _path(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return _unknown(path)
        case "missing":
            message = f"{path} is missing"
        case "model_attributes_type" | "model_type" | "dict_type" if not path:
            message = "the body must be a JSON object, sent with Content-Type: application/json"
        case _:
            found = error["msg"].removeprefix("Value error, ")
            message = f"{path or 'the body'}: {found[:1].lower()}{found[1:]}"
    return ApiError(400, message, param=path or None, code="invalid_value")


def _unknown(path: str) -> ApiError:
    """A field that is not known, or known and not supported."""
    name = path.rpartition(".")[2]
    if name in schema.UNSUPPORTED:
        hint = schema.UNSUPPORTED[name]
        return ApiError(
            400, f"{path} is not supported; {hint}", param=path, code="unsupported_parameter"
        )
    others = [field for field in schema.known_fields() if field != name]
    near = difflib.get_close_matches(name[:MAX_ECHO], others, n=1)
    guess = f"did you mean {near[0]!r}?" if near else "leave it out"
    message = f"unknown field {path}; {_elsewhere(path) or guess}"
    return ApiError(400, message, param=path, code="unknown_parameter")


def _elsewhere(path: str) -> str | None:
    """Where a field belongs that stands in the wrong place; None for any other."""
    place, _, name = path.rpartition(".")
    chat, text = schema.ChatRequest.model_fields, schema.CompletionRequest.model_fields
    if place == "stretto" and (name in chat or name in text):
        return "pass it beside stretto, not in it"
    if place:
        return None
    if name in schema.Extension.model_fields:
        return f"pass it as stretto.{name}"
    if name in schema.StreamOptions.model_fields:
        return f"pass it as stream_options.{name}"
    if name in chat:
        return "/v1/chat/completions has it"
    return "/v1/completions has it" if name in text else None


def _path(loc: Sequence[str | int]) -> str:
    """A place as users write it: messages[0].content."""
    text, before = "", ""
    for item in loc:
        if isinstance(item, int):
            text += f"[{item}]"
        elif before not in UNIONS:
            text += f".{item}" if text else item
        before = str(item)
    return text


def install(app: FastAPI) -> None:
    """Makes every error of an application an OpenAI-style body."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message.lower()}"
        headers = dict(error.headers or {})
        return ApiError(error.status_code, message, headers=headers).response()

    @app.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> JSONResponse:
        return ApiError(500, "the server failed; its log says why", code="bug").response()
