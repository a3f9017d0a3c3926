"""Paths that decode. FastAPI tells of them in its schema; their requests are read here, for less
than half of what it takes to resolve an endpoint's parameters one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from stretto.server import errors
from stretto.server.schema import Common

T = TypeVar("T", bound=Common)


class AskRoute(APIRoute):
    """A path of an endpoint that takes a `body`, of a kind of `Common`, and the request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        kind: type[Common] = get_type_hints(endpoint)["body"]

        async def handler(request: Request) -> Response:
            response: Response = await endpoint(await read_body(kind, request), request)
            return response

        return handler


async def read_body(kind: type[T], request: Request) -> T:
    """The body of a request. Raises `ApiError` for one that is no JSON, or not of this kind."""
    data: Any = await request.body()
    if not data:
        raise errors.ApiError(400, "the body is missing", code="invalid_value")
    if is_json(request.headers.get("content-type", "")):
        data = _parsed(data)
    try:
        return kind.model_validate(data, from_attributes=True)
    except ValidationError as error:
        raise errors.of_validation(error.errors(include_url=False, include_input=False)) from None


def is_json(content_type: str) -> bool:
    """Whether it is application/json, or another type that is JSON too."""
    main, _, sub = content_type.partition(";")[0].strip().lower().partition("/")
    return main == "application" and "/" not in sub and (sub == "json" or sub.endswith("+json"))


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg}"
        raise errors.ApiError(400, message, code="invalid_json") from None
    except (ValueError, RecursionError):  # no UTF-8, a number of too many digits, too deep
        raise errors.ApiError(400, "There was an error parsing the body") from None
