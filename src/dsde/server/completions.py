"""`/v1/completions`: a prompt, continued."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from dsde.core.outputs import CompletionOutput, StreamChunk
from dsde.server.answers import GENERATED, CompletionAnswer
from dsde.server.generation import Generation, GenerationResponse
from dsde.server.logprobs import completion_logprobs
from dsde.server.protocol import CompletionRequest
from dsde.server.service import Service


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=CompletionAnswer, responses=GENERATED)
    async def complete(body: CompletionRequest) -> Response:
        service.check_model(body.model)
        params = body.sampling_params(service.settings.max_output_tokens)
        prompts = list(await asyncio.gather(*map(service.tokens_of, body.prompts)))
        service.check_request(prompts, params)
        return GenerationResponse(service, Generation(body, prompts, params, CompletionWriter()))

    return router


class CompletionWriter:
    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"

    def __init__(self) -> None:
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """of each choice: characters of its tokens so far"""

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(index, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def opening(self, index: int) -> None:
        return None

    def piece(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk),
            "finish_reason": chunk.finish_reason,
        }

    def _logprobs(self, index: int, part: CompletionOutput | StreamChunk) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        logprobs = completion_logprobs(part.token_ids, part.logprobs, self._offsets[index])
        self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return logprobs
