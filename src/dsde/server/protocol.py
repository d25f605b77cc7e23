"""What requests may contain: OpenAI's fields, and this engine's own.

Types are checked here; what values make sense is `SamplingParams`' business. A field that nobody knows is an error, and
so is one that would change the answer but is not served: nothing that was asked for is dropped in silence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dsde.core.params import SamplingParams
from dsde.server.settings import MetricsLevel

MOST_LOGPROBS = 20
MOST_STOPS = 16
"""every new token is compared with each of them"""
MOST_BIASED = 1024

UNIONS = {
    "prompt": "a text, a list of token ids, or a list of either",
    "content": "a text or a list of parts of type text",
    "stop": "a text or a list of texts",
    "speculation": '"on", "off" or a whole number',
}
"""fields of several types, in words"""

_PARAMS = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in ("logprobs", "logit_bias")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    include_usage: bool | None = Field(None, description="end with a chunk that has the usage and no choices")
    include_obfuscation: bool | None = Field(None, description="has no effect")


class GenerationRequest(_Body):
    """What completions and chats have in common. Whatever is left out, or null, has its default."""

    model: str | None = Field(None, description="the name in /v1/models; may be left out")
    max_tokens: int | None = Field(None, description="most tokens to generate")
    min_tokens: int | None = None
    temperature: float | None = Field(None, description="0 is greedy; the default is 1")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: all tokens")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MOST_BIASED, description="token ids to -100..100")
    seed: int | None = Field(None, description="makes the text depend on this number alone")
    stop: str | list[str] | None = Field(None, description=f"up to {MOST_STOPS} strings to end before")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, description="completions of every prompt")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Literal["on", "off"] | int | None = Field(
        None, description='"on": the policy chooses the length; "off": none for this request; a number: always as many'
    )
    slo_tpot_ms: float | None = Field(None, description="milliseconds a token that this request wants to be met")
    spec_decode_metrics: MetricsLevel | None = Field(None, description="what to tell of speculation in `metrics`")

    user: str | None = Field(None, description="has no effect")
    metadata: dict[str, str] | None = Field(None, description="has no effect")
    store: bool | None = Field(None, description="has no effect: nothing is stored")
    service_tier: str | None = Field(None, description="has no effect")
    safety_identifier: str | None = Field(None, description="has no effect")
    prompt_cache_key: str | None = Field(None, description="has no effect: whatever begins alike is shared")

    _neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """fields that are not served, and the values under which that makes no difference"""

    @model_validator(mode="after")
    def _check_served(self) -> GenerationRequest:
        for name, values in self._neutral.items():
            if getattr(self, name) is not None and getattr(self, name) not in values:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        if isinstance(self.stop, list) and len(self.stop) > MOST_STOPS:
            raise ValueError(f"stop may hold at most {MOST_STOPS} strings, got {len(self.stop)}")
        return self

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def sampling_params(self, most_tokens: int | None) -> SamplingParams:
        """As the engine wants it; raises `InvalidInput` for values that make no sense."""
        given: dict[str, Any] = {name: getattr(self, name, None) for name in _PARAMS}
        given = {name: value for name, value in given.items() if value is not None}
        given["max_tokens"] = self.token_limit if self.token_limit is not None else most_tokens
        return SamplingParams(**given, logprobs=self.num_logprobs, logit_bias=self._bias())

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def _bias(self) -> dict[int, float]:
        # JSON has only texts as keys; one that is no number stays as it is and is complained of.
        bias = self.logit_bias or {}
        return {int(token) if token.isdecimal() else token: value for token, value in bias.items()}  # type: ignore[misc]


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]] = Field(description="text or token ids, or several of them")
    max_tokens: int | None = Field(16, description="most tokens to generate")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="how many of the likeliest tokens to report")
    echo: bool | None = Field(None, description="not supported")
    suffix: str | None = Field(None, description="not supported")
    best_of: int | None = Field(None, description="not supported")

    _neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"echo": (False,), "suffix": ("",), "best_of": (1,)}

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if not prompt or isinstance(prompt[0], int) else prompt  # type: ignore[return-value]


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Whatever else a message has is handed to the model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        message = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text for part in self.content)
        return message


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(None, description="most tokens to generate; also called max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="how many of the likeliest to report")
    tools: list[Any] | None = Field(None, description="not supported")
    tool_choice: Any = Field(None, description="not supported")
    parallel_tool_calls: bool | None = Field(None, description="has no effect")
    functions: list[Any] | None = Field(None, description="not supported")
    function_call: Any = Field(None, description="not supported")
    response_format: dict[str, Any] | None = Field(None, description='not supported, but for {"type": "text"}')
    modalities: list[str] | None = Field(None, description='not supported, but for ["text"]')
    audio: Any = Field(None, description="not supported")
    prediction: Any = Field(None, description="not supported")
    reasoning_effort: str | None = Field(None, description="not supported")
    verbosity: str | None = Field(None, description="not supported")
    web_search_options: Any = Field(None, description="not supported")

    _neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return [message.plain() for message in self.messages]


class TokenizeRequest(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, description="instead of a prompt")
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Give either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[int]
