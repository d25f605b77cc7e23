"""What the dashboard shows, as it happens: `/dashboard`, its files, and `/dashboard/events`.

While nobody looks, nothing is collected and the engine makes no records. Viewers get a frame of what has changed about
twenty times a second at most. One that does not keep up loses frames, is told how many, and starts again from a whole
picture; neither the engine nor other viewers wait for it.

The texts of all requests are shown, so there is a dashboard only where the server cannot be reached from outside, or
asks for a key (`limits.Gate` checks it). The page itself holds nothing and is open; it asks for the key and sends it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse

from dsde.engine.async_llm import AsyncLLM
from dsde.engine.engine import StepOutput
from dsde.policies import Policy
from dsde.policies.base import Staged
from dsde.server.dashboard.board import Arrival, Board, Key, arrivals
from dsde.server.dashboard.throughput import Throughput
from dsde.server.errors import ApiError
from dsde.server.settings import ServerSettings

FRAME_S = 0.05
TICK_S = 1.0
"""between frames while nothing happens: they tell a lost viewer from a quiet engine"""
MOST_VIEWERS = 16
MOST_FRAMES = 20
"""that wait for one viewer"""
MOST_STEPS = 2048
"""that wait for a frame"""

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Step(NamedTuple):
    output: StepOutput
    arrived: dict[Key, Arrival]
    throughput: tuple[float, float] | None


@dataclass(slots=True, eq=False)
class Viewer:
    frames: deque[bytes] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    needs_whole: bool = True
    num_dropped: int = 0
    """frames it was too slow for"""


class Feed:
    """Hands the engine's steps to viewers. Lives on one event loop; only `_see` runs on the engine's thread."""

    def __init__(self, llm: AsyncLLM, about: dict[str, Any]) -> None:
        self._llm = llm
        self._about = about
        self._throughput = Throughput(llm.engine.policy.cost_models)
        """what it has learnt of passes outlives its viewers"""
        self._viewers: list[Viewer] = []
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Everything that is kept while somebody looks."""
        engine = self._llm.engine
        self._board = Board(engine.intake.tokenizer)
        self._steps: deque[_Step] = deque()
        self._num_missed = 0
        self._wake = asyncio.Event()

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    async def view(self) -> AsyncIterator[bytes]:
        """Frames for one viewer, as server-sent events, until it leaves or the feed is closed."""
        if self._closed or len(self._viewers) >= MOST_VIEWERS:
            return
        viewer = Viewer()
        self._viewers.append(viewer)
        if len(self._viewers) == 1:
            self._begin()
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(self._run())
            self._llm.listeners.append(self._see)
        self._wake.set()
        try:
            while not self._closed:
                await viewer.ready.wait()
                viewer.ready.clear()
                while viewer.frames:
                    yield viewer.frames.popleft()
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                self._task.cancel()
                with suppress(ValueError):  # a listener that failed has been removed already
                    self._llm.listeners.remove(self._see)

    def close(self) -> None:
        """Let all viewers go: the server is about to end."""
        self._closed = True
        for viewer in self._viewers:
            viewer.ready.set()

    def _see(self, output: StepOutput) -> None:
        """Called by the engine's thread after every step."""
        self._throughput.observe(output.records)
        arrived = arrivals(self._llm.engine, output, self._board)
        if len(self._steps) >= MOST_STEPS:
            self._num_missed += 1
            return
        self._steps.append(_Step(output, arrived, self._throughput.now()))
        with suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            self._send()
            await asyncio.sleep(FRAME_S)

    def _send(self) -> None:
        while self._steps:
            self._board.take(*self._steps.popleft())
        engine = self._llm.engine
        self._board.end_missing(engine.requests, time.monotonic())
        load = {
            "num_running": len(engine.scheduler.running),
            "num_waiting": len(engine.scheduler.waiting),
            "num_missed_steps": self._num_missed,
        }
        frame = _event({**self._board.frame(), **load})
        for viewer in self._viewers:
            if len(viewer.frames) >= MOST_FRAMES:
                viewer.num_dropped += len(viewer.frames)
                viewer.frames.clear()
                viewer.needs_whole = True
            if viewer.needs_whole:
                more = {"about": self._about, "num_dropped": viewer.num_dropped}
                viewer.frames.append(_event({**self._board.whole(), **load, **more}))
                viewer.needs_whole = False
            else:
                viewer.frames.append(frame)
            viewer.ready.set()


def attach(app: FastAPI, llm: AsyncLLM) -> None:
    """Add the dashboard's routes; the feed is `app.state.feed`, to be closed before the server ends."""
    settings: ServerSettings = app.state.service.settings
    feed = Feed(llm, {"model": settings.model_name, "policy": _name(llm.engine.policy)})
    app.state.feed = feed
    folder = files("dsde.server.dashboard")
    pages = {path.name: path.read_bytes() for path in folder.iterdir() if path.name.split(".")[-1] in _TYPES}

    def page(name: str) -> Response:
        _check_private(settings)
        if name not in pages:
            raise ApiError(404, f"The dashboard has no file {name}.")
        return Response(pages[name], media_type=_TYPES[name.split(".")[-1]], headers=_HEADERS)

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return page("index.html")

    @app.get("/dashboard/events", include_in_schema=False)
    async def events() -> Response:
        _check_private(settings)
        if feed.num_viewers >= MOST_VIEWERS:
            raise ApiError(503, f"{MOST_VIEWERS} dashboards are open already.", headers={"Retry-After": "10"})
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(feed.view(), media_type="text/event-stream", headers=headers)

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return page(name)


def _check_private(settings: ServerSettings) -> None:
    if not settings.is_loopback and not settings.api_keys:
        raise ApiError(
            403,
            "The dashboard shows the texts of all requests: beyond this machine it is served only with an API key.",
            code="dashboard_needs_key",
        )


def _name(policy: Policy) -> str:
    parts = [policy.policy, *policy.stages] if isinstance(policy, Staged) else [policy]
    return " | ".join(type(part).__name__ for part in parts)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
