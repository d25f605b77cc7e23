"""What requests may contain: OpenAI's fields, and this engine's own.

Types are checked here; what values make sense is `SamplingParams`' business. A field that nobody knows is an error, and
so is one that would change the answer but is not served: nothing that was asked for is dropped in silence.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dsde.core.params import LEAST_TPOT_MS, LONGEST_DRAFT, MOST_COMPLETIONS, PENALTY_RANGE, SamplingParams
from dsde.server.settings import MetricsLevel

MOST_LOGPROBS = 20
MOST_STOPS = 16
"""every new token is compared with each of them"""
MOST_ITEMS = 1024
"""of a list: each costs time that others wait for"""
MOST_MESSAGES = 4096

UNIONS = {
    "prompt": f"a text, a list of token ids, or a list of at most {MOST_ITEMS} of either",
    "content": "a text or a list of parts of type text",
    "stop": f"a text or a list of at most {MOST_STOPS} texts, none of them empty",
    "speculation": '"on", "off" or a whole number',
}
"""fields of several types, in words"""


def _whole(value: Any) -> Any:
    """To JSON 8.0 is an integer, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Int = Annotated[int, BeforeValidator(_whole)]
_Tokens = Annotated[list[int], Field(fail_fast=True)]  # or every one of a million elements would complain
_Stop = Annotated[str, Field(min_length=1)]
_PARAMS = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in ("logprobs", "logit_bias")]


def _number(about: str, default: int | None = None, **bounds: float) -> Any:
    """A field whose bounds are described here and checked by `SamplingParams`."""
    return Field(default, description=about, json_schema_extra=dict(bounds))


def _top(about: str) -> Any:
    bounds: dict[str, Any] = {"minimum": 0, "maximum": MOST_LOGPROBS}
    return Field(None, ge=0, le=MOST_LOGPROBS, description=about, json_schema_extra=bounds)


def _unserved(*neutral: Any) -> Any:
    """A field that would change the answer and is not served: only values under which it makes no difference."""
    return Field(None, description="not supported", json_schema_extra={"enum": [None, *neutral]})


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, body: Any) -> Any:
        # Every wrong entry of an object would complain for itself, which takes long if there are a million.
        if isinstance(body, dict):
            if len(body) > 2 * len(cls.model_fields):
                raise ValueError(f"The request has {len(body)} fields, more than there are")
            for name, value in body.items():
                if isinstance(value, dict) and len(value) > MOST_ITEMS:
                    raise ValueError(f"{name} may have at most {MOST_ITEMS} entries, got {len(value)}")
        return body


class StreamOptions(_Body):
    include_usage: bool | None = Field(None, description="end with a chunk that has the usage and no choices")
    include_obfuscation: bool | None = Field(None, description="has no effect")


class GenerationRequest(_Body):
    """What completions and chats have in common. Whatever is left out, or null, has its default."""

    model: str | None = Field(None, description="the name in /v1/models; may be left out")
    max_tokens: _Int | None = _number("most tokens to generate", minimum=1)
    min_tokens: _Int | None = _number("no end before so many", minimum=0)
    temperature: float | None = _number("0 is greedy; the default is 1", minimum=0)
    top_p: float | None = _number("keep the likeliest tokens up to this mass", exclusiveMinimum=0, maximum=1)
    top_k: _Int | None = _number("keep so many of the likeliest tokens; 0 or -1: all", minimum=-1)
    min_p: float | None = _number("drop tokens less likely than this share of the best", minimum=0, maximum=1)
    repetition_penalty: float | None = _number(
        "above 1: discourage tokens already seen", minimum=PENALTY_RANGE[0], maximum=PENALTY_RANGE[1]
    )
    presence_penalty: float | None = _number("above 0: discourage tokens already generated", minimum=-2, maximum=2)
    frequency_penalty: float | None = _number("the same, by how often", minimum=-2, maximum=2)
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,18}$")], float] | None = Field(
        None, max_length=MOST_ITEMS, description="token ids to -100..100"
    )
    seed: _Int | None = _number("makes the text depend on this number alone", minimum=-(2**63), maximum=2**64 - 1)
    stop: _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = Field(
        None, description="strings to end before"
    )
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MOST_ITEMS)] | None = Field(
        None, description="tokens to end with"
    )
    ignore_eos: bool | None = None
    n: _Int | None = _number("completions of every prompt", minimum=1, maximum=MOST_COMPLETIONS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Literal["on", "off"] | _Int | None = _number(
        '"on": the policy chooses the length; "off": none for this request; a number: always as many',
        minimum=0,
        maximum=LONGEST_DRAFT,
    )
    slo_tpot_ms: float | None = _number("milliseconds a token that this request wants to be met", minimum=LEAST_TPOT_MS)
    spec_decode_metrics: MetricsLevel | None = Field(None, description="what to tell of speculation in `metrics`")

    user: str | None = Field(None, description="has no effect")
    metadata: dict[str, str] | None = Field(None, description="has no effect")
    store: bool | None = Field(None, description="has no effect: nothing is stored")
    service_tier: str | None = Field(None, description="has no effect")
    safety_identifier: str | None = Field(None, description="has no effect")
    prompt_cache_key: str | None = Field(None, description="has no effect: whatever begins alike is shared")

    @model_validator(mode="after")
    def _check_served(self) -> GenerationRequest:
        for name in self.model_fields_set:
            extra = type(self).model_fields[name].json_schema_extra
            neutral = extra.get("enum") if isinstance(extra, dict) else None
            if isinstance(neutral, list) and getattr(self, name) not in neutral:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return self

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def sampling_params(self, most_tokens: int | None) -> SamplingParams:
        """As the engine wants it; raises `InvalidInput` for values that make no sense."""
        given: dict[str, Any] = {name: getattr(self, name, None) for name in _PARAMS}
        given = {name: value for name, value in given.items() if value is not None}
        given["max_tokens"] = self.token_limit if self.token_limit is not None else most_tokens
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        return SamplingParams(**given, logprobs=self.num_logprobs, logit_bias=bias)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | _Tokens
        | Annotated[list[str], Field(fail_fast=True, max_length=MOST_ITEMS)]
        | Annotated[list[_Tokens], Field(fail_fast=True, max_length=MOST_ITEMS)]
    ) = Field(description="text or token ids, or several of them")
    max_tokens: _Int | None = _number("most tokens to generate", 16, minimum=1)
    logprobs: _Int | None = _top("how many of the likeliest tokens to report beside each")
    echo: bool | None = _unserved(False)
    suffix: str | None = _unserved("")
    best_of: _Int | None = _unserved(1)

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
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = None

    def plain(self) -> dict[str, Any]:
        message = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text for part in self.content)
        return message


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(fail_fast=True, max_length=MOST_MESSAGES)
    max_completion_tokens: _Int | None = _number("most tokens to generate; also called max_tokens", minimum=1)
    logprobs: bool | None = None
    top_logprobs: _Int | None = _top("how many of the likeliest tokens to report at each place")
    tools: list[Any] | None = _unserved([])
    tool_choice: Any = _unserved("none", "auto")
    parallel_tool_calls: bool | None = Field(None, description="has no effect")
    functions: list[Any] | None = _unserved([])
    function_call: Any = _unserved("none", "auto")
    response_format: dict[str, Any] | None = _unserved({"type": "text"})
    modalities: list[str] | None = _unserved(["text"])
    audio: Any = _unserved()
    prediction: Any = _unserved()
    reasoning_effort: str | None = _unserved("none")
    verbosity: str | None = _unserved("medium")
    web_search_options: Any = _unserved()

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
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = Field(
        None, description="instead of a prompt"
    )
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
    tokens: _Tokens
