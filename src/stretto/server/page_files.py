"""The web page: a route for each of its files, all other paths stay the API's."""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

PAGE = Path(__file__).with_name("page")
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[BaseRoute]:
    """Routes of the page; none where its files were not installed."""
    if not PAGE.is_dir():
        return []
    names = sorted(path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file())
    files = PageFiles(directory=PAGE, html=True)
    return [Route(f"/{name}", files, include_in_schema=False) for name in ("", *names)]


class PageFiles(StaticFiles):
    """Files that load nothing from elsewhere and that no other page can frame."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
