"""What is checked before anybody looks at a request: its key, the name it came by, and its size.

Plain ASGI around the whole application, so that nothing is read from those who may not ask.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsde.server.errors import ApiError
from dsde.server.settings import ServerSettings

_OPEN = {"/health", "/ready", "/version", "/metrics", "/dashboard"}
"""hold no text of anybody; the dashboard's page asks for the key before it shows something"""
_MOST_DISCARDED = 64 << 20
"""of a body that is too large: many clients see an answer only after they have sent everything"""


class Gate:
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._digests = [_digest(key.encode()) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_key(scope["path"], headers)
            self._check_host(headers)
            body = await self._read(receive, headers)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_key(self, path: str, headers: Headers) -> None:
        is_page = path.startswith("/dashboard/") and path != "/dashboard/events"
        if not self._digests or path in _OPEN or is_page:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # the bytes as they were sent
        # All of them are compared, and digests of equal length, so that the time says nothing of a key.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = "This server needs an API key: send the header Authorization: Bearer KEY."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_host(self, headers: Headers) -> None:
        """Without a key, a web page from elsewhere must not get in by a name of its own that leads to this machine."""
        if self._digests or not self._settings.is_loopback:
            return
        name = _without_port(headers.get("host", ""))
        if name in ("", "localhost", self._settings.host) or _is_loopback(name):
            return
        message = f"This server is for this machine alone; call it localhost rather than {name[:100]}."
        raise ApiError(403, message, code="wrong_host")

    async def _read(self, receive: Receive, headers: Headers) -> bytes | None:
        """The whole body, within size and time; None if the client has gone."""
        most = self._settings.max_body_bytes
        too_large = ApiError(
            413, f"The body may have at most {most} bytes.", code="body_too_large", headers={"Connection": "close"}
        )
        if _declared_length(headers) > (most if "expect" in headers else _MOST_DISCARDED):
            raise too_large
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    num_bytes += len(message.get("body", b""))
                    if num_bytes > max(most, _MOST_DISCARDED):
                        raise too_large
                    if num_bytes <= most:
                        chunks.append(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            message_ = f"The request did not arrive within {self._settings.body_timeout_s:g} seconds."
            raise ApiError(408, message_, code="request_timeout", headers={"Connection": "close"}) from None
        if num_bytes > most:
            raise too_large
        return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _declared_length(headers: Headers) -> int:
    length = headers.get("content-length", "0")
    return int(length) if length.isdecimal() else 0


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
