"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, one sentence each."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dsde.core.errors import DsdeError, InvalidInput, OutOfMemory
from dsde.engine.async_llm import EngineStopped

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


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
        return ApiError(504, "The request took longer than this server allows.", code="timeout")
    if isinstance(error, OutOfMemory | EngineStopped):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, DsdeError):
        return ApiError(500, str(error))
    logger.error("A request failed.", exc_info=error)
    return ApiError(500, "Something went wrong in the server; its log says what.", code="internal_error")


def add_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def _on_validation(_: Request, error: RequestValidationError) -> JSONResponse:
        return _describe(error).response()

    @app.exception_handler(HTTPException)
    async def _on_http(request: Request, error: HTTPException) -> JSONResponse:
        messages = {
            404: f"There is no {request.url.path} here; /docs lists what there is.",
            405: f"{request.url.path} cannot be used with {request.method}.",
        }
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    @app.exception_handler(Exception)
    @app.exception_handler(DsdeError)
    @app.exception_handler(ApiError)
    async def _on_error(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()


def _describe(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    param = ".".join(place) or None
    return ApiError(400, f"{param or 'The body'}: {first['msg']}.", code="invalid_type", param=param)
