"""Puts the server together: routes, errors, limits. `create_app` is all that others need.

`app.state.service` is the `Service` that every handler works with: `service.llm` (the `AsyncLLM`) and
`service.settings`.
"""

from __future__ import annotations

from fastapi import FastAPI

import dsde
from dsde.engine.async_llm import AsyncLLM
from dsde.server import live
from dsde.server.completions import completions_router
from dsde.server.errors import add_handlers
from dsde.server.service import Service
from dsde.server.settings import ServerSettings


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    app = FastAPI(title="dsde", version=dsde.__version__)
    service = Service(llm, settings)
    app.state.service = service
    add_handlers(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.include_router(completions_router(service))
    if settings.dashboard:
        live.attach(app, llm)
    return app
