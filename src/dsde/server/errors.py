"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, one sentence each."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from dsde.core.errors import DsdeError, InvalidInput, OutOfMemory
from dsde.engine.async_llm import EngineStopped
from dsde.server.protocol import UNIONS

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorInfo


class ApiError(Exception):
    """An answer other than the one that was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """Whatever went wrong, as an answer; what nobody expected is logged and not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidInput):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, TimeoutError):
        return ApiError(504, "The answer took longer than this server allows.", code="timeout")
    if isinstance(error, OutOfMemory | EngineStopped):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, DsdeError):
        return ApiError(500, str(error))
    logger.error("A request failed.", exc_info=error)
    return ApiError(500, "Something went wrong in the server; its log says what.", code="internal_error")


def add_handlers(app: FastAPI) -> None:
    async def on_validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _describe(error).response()

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        messages = {
            400: _about_reading(error.__cause__),
            404: f"There is no {request.url.path} here; /docs lists what there is.",
            405: f"{request.url.path} cannot be used with {request.method}.",
        }
        message = messages.get(error.status_code, f"{str(error.detail).rstrip('.')}.")
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (ApiError, DsdeError):
        app.add_exception_handler(kind, on_error)


def _describe(error: RequestValidationError) -> ApiError:
    """The first field that is wrong, in one sentence."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        message = f"The body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}."
        return ApiError(400, message, code="invalid_json")
    place = [str(part) for part in first["loc"][1:]]
    if not place:
        return ApiError(400, _about_body(first), code="invalid_body")
    for depth, part in enumerate(place, start=1):
        if part in UNIONS and depth < len(place):  # every member of a union complains for itself: none says it all
            path = ".".join(place[:depth])
            return ApiError(400, f"{path} must be {UNIONS[part]}.", code="invalid_type", param=path)
    path = ".".join(place)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{path} is not a field of this request.", code="unknown_field", param=path)
    reason = str(first["msg"])
    return ApiError(400, f"{path}: {reason[0].lower()}{reason[1:]}.", code="invalid_type", param=path)


def _about_body(error: dict[str, Any]) -> str:
    if error["type"] == "value_error":
        return f"{error['ctx']['error']}."
    return "The body must be a JSON object, sent with Content-Type: application/json."


def _about_reading(cause: BaseException | None) -> str:
    if isinstance(cause, UnicodeDecodeError):
        return "The body is not valid UTF-8."
    if isinstance(cause, RecursionError):
        return "The body is not valid JSON for this server: it is nested too deeply."
    return "The body is not valid JSON for this server: it holds a number with too many digits."
