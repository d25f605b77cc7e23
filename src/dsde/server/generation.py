"""The way of a request through the engine to its client: let in, watched, timed, streamed or answered as a whole.

Knows nothing of what an answer looks like: that is for a `Writer`, one for every API.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dsde.core.outputs import CompletionOutput, RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.engine.async_llm import Submission
from dsde.server.connection import ClientGone, while_connected
from dsde.server.errors import as_api_error
from dsde.server.protocol import GenerationRequest
from dsde.server.records import Record
from dsde.server.service import Service
from dsde.server.speculation import describe_speculation

_FAREWELL_S = 5.0
"""to tell a client that its time is over"""


class Writer(Protocol):
    """One answer in the shape of its API, as a whole or in pieces. Choices are numbered across prompts."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """A finished completion."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream tells of a choice before its first token."""

    def piece(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        """What a step added to a choice."""


@dataclass(slots=True)
class Generation:
    """What is to be generated for one API request."""

    body: GenerationRequest
    prompts: list[list[int]]
    params: SamplingParams
    writer: Writer
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


class GenerationResponse(Response):
    """Does the work when it is sent, so that whatever happens to the client, the engine is told."""

    def __init__(self, service: Service, generation: Generation) -> None:
        self._service = service
        self._generation = generation
        self._level = generation.body.spec_decode_metrics or service.settings.spec_decode_metrics
        self._places = {self._name(place): place for place in range(len(generation.prompts))}
        self._outputs: dict[int, RequestOutput] = {}
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record.of(scope)
        record.num_prompt_tokens = sum(map(len, self._generation.prompts))
        if self._service.settings.log_prompts:
            record.prompts = [await self._service.text_of(prompt) for prompt in self._generation.prompts]
        with self._service.admission.enter(self._generation.num_choices):
            try:
                if self._generation.body.stream:
                    await while_connected(receive, self._stream(send))
                else:
                    answer = await while_connected(receive, self._answer())
                    await JSONResponse(answer)(scope, receive, send)
            except ClientGone:
                record.client_gone = True
            finally:
                record.outputs = list(self._outputs.values())

    async def _answer(self) -> dict[str, Any]:
        async with asyncio.timeout(self._service.settings.request_timeout_s), aclosing(self._events()) as events:
            async for _ in events:
                pass
        choices = [
            self._generation.writer.choice(place * self._generation.params.n + output.index, output)
            for place in range(len(self._generation.prompts))
            for output in self._outputs[place].outputs
        ]
        return {**self._head(self._generation.writer.object_name), "choices": choices, **self._closing()}

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout(self._service.settings.request_timeout_s), aclosing(self._lines()) as lines:
                async for line in lines:
                    await send({"type": "http.response.body", "body": line, "more_body": True})
        except Exception as error:  # too late for a status: the stream itself must tell
            last = _line(_dumps(as_api_error(error).body()))
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncGenerator[bytes]:
        """Server-sent events."""
        generation = self._generation
        writer, n = generation.writer, generation.params.n
        wants_usage = generation.body.stream_options is not None and generation.body.stream_options.include_usage
        head = _dumps(self._head(writer.chunk_name))[:-1] + ',"choices":['
        tail = '],"usage":null}' if wants_usage else "]}"
        for index in range(generation.num_choices):
            if (opening := writer.opening(index)) is not None:
                yield _line(head + _dumps(opening) + tail)
        async with aclosing(self._events()) as events:
            async for event in events:
                # Nothing may be to be shown yet: half a character, or what may become a stop string.
                if event.text or event.finish_reason or event.logprobs:
                    index = self._places[event.request_id] * n + event.index
                    yield _line(head + _dumps(writer.piece(index, event)) + tail)
        closing = self._closing()
        if not wants_usage:
            del closing["usage"]
        if closing:
            yield _line(_dumps({**self._head(writer.chunk_name), "choices": [], **closing}))
        yield _line("[DONE]")

    async def _events(self) -> AsyncGenerator[StreamChunk]:
        """Chunks; finished requests are kept."""
        trace = self._level == "detailed"
        submissions = [
            Submission(prompt, self._generation.params, self._name(place), trace)
            for place, prompt in enumerate(self._generation.prompts)
        ]
        async with aclosing(self._service.llm.generate_all(submissions)) as events:
            async for event in events:
                if isinstance(event, StreamChunk):
                    yield event
                else:
                    self._outputs[self._places[event.request_id]] = event
                    self._service.metrics.count_request(event)

    def _name(self, place: int) -> str:
        return f"{self._generation.request_id}-{place}"

    def _head(self, object_name: str) -> dict[str, Any]:
        generation = self._generation
        return {
            "id": f"{generation.writer.id_prefix}{generation.request_id}",
            "object": object_name,
            "created": generation.created,
            "model": self._service.settings.model_name,
        }

    def _closing(self) -> dict[str, Any]:
        """What can be told only at the end."""
        outputs = list(self._outputs.values())
        closing: dict[str, Any] = {"usage": usage_of(outputs)}
        if self._level != "none":
            # As in vLLM: it is about one sequence of tokens, so there is none for several.
            alone = outputs[0] if self._generation.num_choices == 1 else None
            closing["metrics"] = {
                "speculative_decoding": None if alone is None else describe_speculation(alone.metrics)
            }
        return closing


def usage_of(outputs: list[RequestOutput]) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    num_cached = sum(min(o.metrics.num_cached_prompt_tokens, len(o.prompt_token_ids)) for o in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _dumps(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _line(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
