"""Start and end of a server."""

from __future__ import annotations

import uvicorn

from dsde.engine.async_llm import AsyncLLM
from dsde.server.app import create_app
from dsde.server.settings import ServerSettings


def serve(llm: AsyncLLM, settings: ServerSettings) -> None:
    """Answer requests until told to stop."""
    app = create_app(llm, settings)
    uvicorn.run(app, host=settings.host, port=settings.port, log_level="warning")
