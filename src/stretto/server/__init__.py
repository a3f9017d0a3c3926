"""An OpenAI-compatible server over one `LM`: an application for any ASGI server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.errors import Unsupported
from stretto.server.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stretto.lm import LM

__all__ = ["Settings", "create_app"]


def create_app(lm: LM, settings: Settings | None = None) -> FastAPI:
    """The ASGI application that answers with `lm`; it may be mounted into another one.

    Its engine thread starts with the first request or the application's start-up, and ends at its
    shutdown; `app.state.engine` is the `EngineLoop`. Raises `Unsupported` where FastAPI is
    not installed.
    """
    check_installed()
    from stretto.server.app import build

    return build(lm, Settings() if settings is None else settings)


def check_installed() -> None:
    """Raises `Unsupported` unless what the server needs is installed."""
    from importlib.util import find_spec

    missing = [n for n in ("fastapi", "uvicorn", "prometheus_client") if find_spec(n) is None]
    if missing:
        raise Unsupported(
            f"the server needs {', '.join(missing)}; pip install 'stretto-lm[server]'"
        )
