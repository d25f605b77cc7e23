"""Start and end of a server.

The port is taken before models are loaded, so that one which is in use is known at once. On SIGTERM or Ctrl-C new
requests are refused, those under way finish within a limit, and the process ends with 0; a second signal ends it now.
When the engine fails it ends with 1, for whoever starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from dsde.core.errors import InvalidInput
from dsde.engine.async_llm import AsyncLLM, EngineStopped
from dsde.server.app import create_app
from dsde.server.connection import Connection
from dsde.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_FLUSH_S = 5
"""for what has been answered to reach its client"""


def bind(settings: ServerSettings) -> socket.socket:
    """A socket that is listening, so that others wait rather than fail while models are loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise InvalidInput(f"Cannot listen on {settings.host} port {settings.port}: {reason}.") from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(llm: AsyncLLM, settings: ServerSettings, listener: socket.socket) -> None:
    """Answer requests until a signal comes, or the engine fails: then raises `EngineStopped`."""
    _allow_connections()
    server = Server(create_app(llm, settings), settings)
    server.run(sockets=[listener])
    if llm.failure is not None:
        raise EngineStopped(f"The engine failed: {llm.failure}.") from llm.failure


def _allow_connections() -> None:
    """As many as the system allows: by default many systems stop at a thousand open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Server(uvicorn.Server):
    """uvicorn, with an end that loses nothing."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        protocol: Any = partial(Connection, header_timeout_s=settings.body_timeout_s)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )
        self._service = app.state.service
        self._settings = settings
        self._feed: Any = getattr(app.state, "feed", None)
        self._num_signals = 0

    def end(self) -> None:
        """Finish what is under way and stop; called again, stop now. From any thread."""
        self._num_signals += 1

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own would let the signal end the process once more after everything has been cleaned up.
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(_: int, __: FrameType | None) -> None:
            self.end()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def main_loop(self) -> None:
        serving = asyncio.create_task(super().main_loop())
        while not self._num_signals and not serving.done() and self._service.llm.is_running:
            await asyncio.sleep(0.05)
        await self._drain()
        self.should_exit = True
        await serving

    async def _drain(self) -> None:
        service = self._service
        service.admission.close()
        if not service.llm.is_running:
            logger.error("The engine has failed: %s", service.llm.failure)
            return
        logger.info("Shutting down; %d requests are under way.", service.admission.num_requests)
        idle = asyncio.create_task(service.admission.wait_idle())
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while not idle.done() and self._num_signals < 2 and time.monotonic() < deadline:
            await asyncio.wait([idle], timeout=0.05)
        if not idle.done():
            logger.warning("%d requests did not finish and are ended.", service.admission.num_requests)
            await asyncio.to_thread(service.llm.shutdown)
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await idle
        idle.cancel()
        if self._feed is not None:
            self._feed.close()
