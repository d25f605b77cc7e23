"""Connections to clients, for as long as there is somebody at the other end who gets on with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dsde.server.errors import ApiError

T = TypeVar("T")

MOST_HEADER_BYTES = 64 << 10


class ClientGone(Exception):
    """Nobody is left to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once when the client goes away. Its request has been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leave(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds on what comes before a request is known, and errors in OpenAI's shape."""

    def __init__(self, *args: Any, header_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests and self._deadline is None:
            self._expect_headers()
        super().data_received(data)
        if self._is_between_requests:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MOST_HEADER_BYTES:
                self._refuse(431, f"The headers may have at most {MOST_HEADER_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._stop_expecting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        message = f"The request did not arrive within {self._header_timeout_s:g} seconds."
        self._num_header_bytes = 0
        self._deadline = self.loop.call_later(self._header_timeout_s, self._refuse, 408, message)

    def _stop_expecting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int, message: str) -> None:
        self._stop_expecting()
        if self.transport.is_closing():
            return
        body = json.dumps(ApiError(status, message).body()).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
