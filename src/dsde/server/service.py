"""What all handlers share: the engine, the settings, who is let in, what is counted, and texts to tokens."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dsde.core.errors import InvalidInput
from dsde.core.params import SamplingParams
from dsde.engine.async_llm import AsyncLLM
from dsde.models.tokenizer import Tokenizer
from dsde.server.admission import Admission
from dsde.server.errors import ApiError
from dsde.server.metrics import ServerMetrics
from dsde.server.settings import ServerSettings

T = TypeVar("T")

_LONG_TEXT = 4096
"""characters from which on tokenising takes so long that others should not wait for it"""
_NUM_WORKERS = 2


class Service:
    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.admission = Admission(llm.engine.config.max_num_seqs + settings.max_queue)
        self.metrics = ServerMetrics(llm, self.admission)
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="dsde-tokenizer")

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.llm.engine.intake.tokenizer
        if tokenizer is None:
            raise InvalidInput("This model has no tokenizer: give prompts as lists of token ids.")
        return tokenizer

    @property
    def max_model_len(self) -> int:
        return self.llm.engine.intake.max_model_len

    def check_model(self, name: str | None) -> None:
        known = self.settings.model_name
        if name is not None and name != known:
            near = f"; did you mean {known}?" if difflib.get_close_matches(name, [known]) else f"; this is {known}."
            raise ApiError(404, f"There is no model {name[:200]!r} here{near}", code="model_not_found", param="model")

    def check_request(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Refuse before anything is begun what the engine would refuse."""
        most = self.settings.max_output_tokens
        if most is not None and params.max_tokens is not None and params.max_tokens > most:
            raise InvalidInput(f"max_tokens must be at most {most} on this server, got {params.max_tokens}.")
        for tokens in prompts:
            try:
                self.llm.engine.intake.check(tokens, params)
            except InvalidInput as error:
                if len(tokens) < self.max_model_len:
                    raise
                raise ApiError(400, str(error), code="context_length_exceeded", param="prompt") from None

    async def tokens_of(self, prompt: str | list[int], add_special_tokens: bool = True) -> list[int]:
        """A prompt as the engine wants it."""
        intake = self.llm.engine.intake
        return await self._work(len(prompt), lambda: intake.tokenize(prompt, add_special_tokens))

    async def tokens_of_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        tokenizer = self.tokenizer

        def render() -> list[int]:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt)
            return tokenizer.encode(text, add_special_tokens=False)

        return await self._work(sum(1 + len(str(message.get("content"))) for message in messages), render)

    async def text_of(self, tokens: list[int]) -> str:
        return await self._work(len(tokens), lambda: self.tokenizer.decode(tokens, skip_special_tokens=False))

    async def _work(self, size: int, function: Callable[[], T]) -> T:
        """Whatever takes long is done elsewhere, by few, so that neither the event loop nor the engine has to wait."""
        if size < _LONG_TEXT:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._workers, function)
