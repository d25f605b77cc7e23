"""What is known of a request at its end: for the log, the metrics and the traces. Middleware that keeps it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsde.core.outputs import RequestOutput
from dsde.server.errors import as_api_error

CLIENT_GONE = 499
"""the status that a log shows where nobody was left to get one"""
_KEY = "dsde.record"
_GOOD_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(slots=True)
class Record:
    request_id: str
    method: str
    path: str
    headers: Headers
    began_s: float = field(default_factory=time.time)
    route: str = "other"
    """the path as it was declared, so that there are few of them"""
    status: int = 0
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    outputs: list[RequestOutput] = field(default_factory=list)
    """of requests that finished"""
    prompts: list[str] | None = None
    """only where they may be logged"""
    client_gone: bool = False

    @staticmethod
    def of(scope: Scope) -> Record:
        record = scope[_KEY]
        assert isinstance(record, Record)
        return record

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(one.token_ids) for output in self.outputs for one in output.outputs)


class Recorder:
    """Gives every request an id, which its answer has in X-Request-Id, and tells `watchers` when it is over."""

    def __init__(self, app: ASGIApp, watchers: list[Callable[[Record], None]]) -> None:
        self._app = app
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        record = Record(request_id, scope["method"], scope["path"], headers)
        scope[_KEY] = record
        began = time.perf_counter()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as error:
            if record.status:
                raise  # half an answer: the connection must break, so that nobody takes it for a whole one
            await as_api_error(error).response()(scope, receive, note)
        finally:
            record.total_s = time.perf_counter() - began
            record.route = getattr(scope.get("route"), "path", "other")
            if record.client_gone or not record.status:
                record.status = CLIENT_GONE
            for watcher in self._watchers:
                watcher(record)
