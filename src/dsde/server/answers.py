"""What answers look like, for the API's description. Handlers build them as plain dictionaries."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from dsde.server.errors import ErrorAnswer
from dsde.server.speculation import SpeculationMetrics


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Answer):
    cached_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Metrics(_Answer):
    speculative_decoding: SpeculationMetrics | None


class _Generated(_Answer):
    id: str
    object: str
    created: int
    model: str
    usage: Usage
    metrics: Metrics | None = None


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class CompletionAnswer(_Generated):
    choices: list[CompletionChoice]


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(_Answer):
    role: str
    content: str
    refusal: None


class ChatChoice(_Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatAnswer(_Generated):
    choices: list[ChatChoice]


class Model(_Answer):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "dsde"
    max_model_len: int


class ModelList(_Answer):
    object: str = "list"
    data: list[Model]


class TokenizeAnswer(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(_Answer):
    prompt: str


class Version(_Answer):
    version: str


class Status(_Answer):
    status: str


_ERRORS = {
    400: "The request makes no sense to this server; the message says why.",
    401: "The API key is missing or wrong.",
    403: "The server was called by a name that is not this machine's.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "Something went wrong in the server.",
    503: "The server is starting, shutting down, or its engine has failed.",
    504: "The answer took longer than this server allows.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description} for status, description in _ERRORS.items()
}
GENERATED: dict[int | str, dict[str, Any]] = {
    200: {"description": "Whole, or with stream as server-sent events.", "content": {"text/event-stream": {}}},
    **ERRORS,
}
