"""The application: its paths, and what stands around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

from stretto import __version__
from stretto.server import errors, openapi
from stretto.server.answers import Answer, answer_whole
from stretto.server.asks import accepted_methods, read_ask
from stretto.server.engine import EngineLoop
from stretto.server.gate import OWNER, Gate
from stretto.server.metrics import Metrics
from stretto.server.page_files import page_routes
from stretto.server.route import AskRoute
from stretto.server.schema import ChatRequest, Common, CompletionRequest
from stretto.server.settings import Settings
from stretto.server.streams import EventStream
from stretto.server.wire import Chat, Envelope, Shape, Text

if TYPE_CHECKING:
    from stretto.lm import LM


def build(lm: LM, settings: Settings) -> FastAPI:
    """The application that answers with `lm`."""
    server = Server(lm, settings)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await run_in_threadpool(server.engine.close)

    app = FastAPI(
        title="Stretto",
        version=__version__,
        description=openapi.DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        lifespan=life,
    )
    app.state.engine = server.engine
    errors.install(app)
    server.install(app)
    openapi.install(app, has_keys=bool(settings.keys))
    app.router.routes.extend(page_routes())
    app.add_middleware(Gate, settings=settings, metrics=server.engine.metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


class Server:
    """The handlers of one application."""

    def __init__(self, lm: LM, settings: Settings) -> None:
        self.lm = lm
        self.settings = settings
        self.name = lm.name if settings.name is None else settings.name
        self.created = int(time.time())
        self.methods = accepted_methods(lm)
        self.engine = EngineLoop(lm, settings, Metrics(lm, lambda: self.engine))

    def install(self, app: FastAPI) -> None:
        chat = openapi.answers(Chat.kind, "chat")
        text = openapi.answers(Text.kind, "text")
        asked: dict[str, Any] = {
            "methods": ["POST"], "route_class_override": AskRoute, "tags": ["OpenAI"],
        }  # fmt: skip
        add = app.router.add_api_route
        add("/v1/chat/completions", self.chat, responses=chat, **asked)
        add("/v1/completions", self.completions, responses=text, **asked)
        app.get("/v1/models", responses=openapi.MODELS, tags=["OpenAI"])(self.models)
        app.get("/v1/models/{model:path}", responses=openapi.MODEL, tags=["OpenAI"])(self.model)
        app.get("/health", responses=openapi.HEALTH, tags=["operation"])(self.health)
        app.get("/ready", responses=openapi.READY, tags=["operation"])(self.ready)
        app.get("/metrics", responses=openapi.METRICS, tags=["operation"])(self.metrics)

    # -- answers -------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answers a chat: JSON, or server-sent events with `stream: true`."""
        return await self._answer(Chat(), body, request, wants_logprobs=body.logprobs)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continues a text: JSON, or server-sent events with `stream: true`."""
        wants_logprobs = body.logprobs is not None
        return await self._answer(Text(), body, request, wants_logprobs=wants_logprobs)

    async def _answer(
        self, shape: Shape, body: Common, request: Request, *, wants_logprobs: bool
    ) -> Response:
        self._check_model(body.model)
        ask = read_ask(body, self.settings, request.scope.get(OWNER, ""))
        answer = Answer(
            engine=self.engine,
            ask=ask,
            envelope=Envelope(shape, self.name),
            ticket=self.engine.admit(ask.num_choices),
            wants_logprobs=wants_logprobs,
            wants_details=body.stretto is not None or body.options.threads,
            options=body.options,
        )
        is_handed_on = False
        try:
            if not body.stream:
                return await answer_whole(answer, request)
            stream = EventStream(answer)
            await stream.begin()
            is_handed_on = True
            return stream
        finally:
            if not is_handed_on:
                answer.close()

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise errors.ApiError(
                404,
                f"model {name!a} is not served here; {self.name!a} is",
                param="model",
                code="model_not_found",
            )

    # -- the model -----------------------------------------------------------------------------

    async def models(self) -> JSONResponse:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, model: str) -> JSONResponse:
        """The model of this name."""
        self._check_model(model)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        lm = self.lm
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "stretto",
            "stretto": {
                "dialect": lm.card.dialect,
                "methods": self.methods,
                "engine": lm.engine.name,
                "context_length": lm.engine.max_positions,
                "pool_slots": lm.scheduler.pool.num_slots,
                "has_chat_template": lm.has_chat_template,
            },
        }

    # -- operation -----------------------------------------------------------------------------

    async def health(self) -> JSONResponse:
        """200 while the process can answer at all."""
        if not self.engine.is_alive:
            raise errors.stopped()
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """200 while requests are admitted; 503 when it is shutting down, 500 if its engine has
        stopped."""
        if self.engine.is_draining or not self.engine.is_alive:
            raise self.engine.refusal()
        return JSONResponse({"status": "ready", "model": self.name})

    async def metrics(self) -> Response:
        """Prometheus's text format."""
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.engine.metrics.text(), media_type=content_type)
