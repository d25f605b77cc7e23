"""`/v1/completions`: a prompt, continued."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dsde.core.outputs import RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.server.errors import as_api_error
from dsde.server.protocol import CompletionRequest
from dsde.server.service import Job, Service


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def complete(body: CompletionRequest) -> Response:
        job = Job(body.prompt, SamplingParams(**body.sampling()))  # type: ignore[arg-type]
        if body.stream:
            return StreamingResponse(_events(service, job), media_type="text/event-stream")
        async for event in service.run(job):
            if isinstance(event, RequestOutput):
                return JSONResponse(_answer(service, job, event))
        raise AssertionError("a request ended without an output")

    return router


def _head(service: Service, job: Job) -> dict[str, Any]:
    return {
        "id": f"cmpl-{job.request_id}",
        "object": "text_completion",
        "created": job.created,
        "model": service.settings.model_name,
    }


def _answer(service: Service, job: Job, output: RequestOutput) -> dict[str, Any]:
    choices = [
        {"index": one.index, "text": one.text, "logprobs": None, "finish_reason": one.finish_reason}
        for one in output.outputs
    ]
    return {**_head(service, job), "choices": choices}


async def _events(service: Service, job: Job) -> AsyncIterator[str]:
    try:
        async for event in service.run(job):
            if isinstance(event, StreamChunk):
                choice = {
                    "index": event.index,
                    "text": event.text,
                    "logprobs": None,
                    "finish_reason": event.finish_reason,
                }
                yield _data({**_head(service, job), "choices": [choice]})
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _data(as_api_error(error).body())


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
