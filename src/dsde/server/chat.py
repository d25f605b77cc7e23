"""`/v1/chat/completions`: a conversation, answered."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from dsde.core.outputs import CompletionOutput, StreamChunk
from dsde.server.answers import GENERATED, ChatAnswer
from dsde.server.generation import Generation, GenerationResponse
from dsde.server.logprobs import chat_logprobs
from dsde.server.protocol import ChatRequest
from dsde.server.service import Service


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=ChatAnswer, responses=GENERATED)
    async def chat(body: ChatRequest) -> Response:
        service.check_model(body.model)
        params = body.sampling_params(service.settings.max_output_tokens)
        prompt = await service.tokens_of_chat(body.conversation)
        service.check_request([prompt], params)
        return GenerationResponse(service, Generation(body, [prompt], params, ChatWriter(params.logprobs or 0)))

    return router


class ChatWriter:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, num_top_logprobs: int) -> None:
        self._num_top = num_top_logprobs

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": chunk.text} if chunk.text else {},
            "logprobs": self._logprobs(chunk),
            "finish_reason": chunk.finish_reason,
        }

    def _logprobs(self, part: CompletionOutput | StreamChunk) -> dict[str, Any] | None:
        return None if part.logprobs is None else chat_logprobs(part.token_ids, part.logprobs, self._num_top)
