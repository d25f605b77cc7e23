"""Puts the server together: routes, errors, limits, and who watches. `create_app` is all that others need.

`app.state.service` is the `Service` that every handler works with: `service.llm` (the `AsyncLLM`) and
`service.settings`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import dsde
from dsde.engine.async_llm import AsyncLLM
from dsde.server import live
from dsde.server.chat import chat_router
from dsde.server.completions import completions_router
from dsde.server.errors import add_handlers
from dsde.server.limits import Gate
from dsde.server.logs import log_request
from dsde.server.operations import operations_router
from dsde.server.records import Record, Recorder
from dsde.server.service import Service
from dsde.server.settings import ServerSettings
from dsde.server.tracing import make_tracer


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    service = Service(llm, settings)
    watchers: list[Callable[[Record], None]] = [log_request, service.metrics.count_answer]
    endings = [service.close]
    if settings.otlp_endpoint is not None:
        trace, finish = make_tracer(settings.otlp_endpoint, settings.model_name)
        watchers.append(trace)
        endings.append(finish)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for end in endings:
            end()

    app = FastAPI(title="dsde", version=dsde.__version__, lifespan=lifespan)
    app.state.service = service
    add_handlers(app)
    # The last one added is the first to see a request.
    app.add_middleware(Gate, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    app.add_middleware(Recorder, watchers=watchers)
    for router in (completions_router(service), chat_router(service), operations_router(service)):
        app.include_router(router)
    if settings.dashboard:
        live.attach(app, llm)
    return app
