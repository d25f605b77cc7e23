"""What is asked of a server besides texts: whether it lives, what it serves, how it is doing, and tokens."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import dsde
from dsde.core.errors import InvalidInput
from dsde.server.answers import ERRORS, DetokenizeAnswer, Model, ModelList, Status, TokenizeAnswer, Version
from dsde.server.errors import ApiError
from dsde.server.protocol import DetokenizeRequest, TokenizeRequest
from dsde.server.service import Service

_UNWELL: dict[int | str, dict[str, Any]] = {503: ERRORS[503]}


def operations_router(service: Service) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    def model() -> Model:
        return Model(id=service.settings.model_name, created=started, max_model_len=service.max_model_len)

    @router.get("/health", responses=_UNWELL)
    async def health() -> Status:
        """Whether the engine lives; if not, only a new start helps."""
        if not service.llm.is_running:
            raise ApiError(503, f"The engine has ended: {service.llm.failure}.", code="engine_unavailable")
        return Status(status="ok")

    @router.get("/ready", responses=_UNWELL)
    async def ready() -> Status:
        """Whether new requests are taken."""
        if service.admission.is_closed or not service.llm.is_running:
            raise ApiError(503, "No new requests are taken.", code="not_ready")
        return Status(status="ready")

    @router.get("/version")
    async def version() -> Version:
        return Version(version=dsde.__version__)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(await service.metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> ModelList:
        return ModelList(data=[model()])

    @router.get("/v1/models/{name:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def one_model(name: str) -> Model:
        service.check_model(name)
        return model()

    @router.post("/tokenize", responses=ERRORS, response_model_exclude_unset=True)
    async def tokenize(body: TokenizeRequest) -> TokenizeAnswer:
        service.check_model(body.model)
        if body.messages is not None:
            messages = [message.plain() for message in body.messages]
            tokens = await service.tokens_of_chat(messages, body.add_generation_prompt)
        else:
            tokens = await service.tokens_of(body.prompt or "", body.add_special_tokens)
        answer = TokenizeAnswer(count=len(tokens), max_model_len=service.max_model_len, tokens=tokens)
        if body.return_token_strs:
            answer.token_strs = [service.tokenizer.token_text(token) for token in tokens]
        return answer

    @router.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> DetokenizeAnswer:
        service.check_model(body.model)
        size = service.llm.engine.intake.vocab_size
        if any(not 0 <= token < size for token in body.tokens):
            raise InvalidInput(f"tokens must be from 0 to {size - 1}.")
        return DetokenizeAnswer(prompt=await service.text_of(body.tokens))

    return router
