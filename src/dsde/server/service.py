"""What all handlers share: the engine, the settings, and the way from a request to its events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from dsde.core.outputs import RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.engine.async_llm import AsyncLLM
from dsde.models.tokenizer import Tokenizer
from dsde.server.settings import ServerSettings


@dataclass(slots=True)
class Job:
    """One request as the engine gets it."""

    prompt: str | list[int]
    params: SamplingParams
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


class Service:
    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.engine.intake.tokenizer

    async def run(self, job: Job) -> AsyncIterator[StreamChunk | RequestOutput]:
        async with (
            asyncio.timeout(self.settings.request_timeout_s),
            aclosing(self.llm.generate(job.prompt, job.params, job.request_id)) as events,
        ):
            async for event in events:
                yield event
