"""What requests may contain, as OpenAI's API has it, with this engine's additions.

Types are checked here; what values are allowed is `SamplingParams`' business. A field that nobody knows is an error, and so
is one that would change the answer but cannot be served: nothing asked for is dropped in silence.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from dsde.core.params import SamplingParams, Speculation

_DEFAULTS = SamplingParams()


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = _DEFAULTS.temperature
    top_p: float = _DEFAULTS.top_p
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation = "on"

    def sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "n": self.n,
            "stop": self.stop,
            "seed": self.seed,
            "speculation": self.speculation,
        }


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
