"""A request: its completions in the making and everything it will report. Knows nothing of scheduling."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dsde.core.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.core.sequence import Sequence
from dsde.engine.text import TextState


@dataclass(slots=True, eq=False)
class Completion:
    """One sequence and what its user sees of it."""

    sequence: Sequence
    text: TextState
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_reported: int = 0
    """tokens that have been streamed"""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def extend(self, tokens: list[int]) -> list[int]:
        """Add emitted tokens until one ends the completion; returns those added."""
        sequence = self.sequence
        room = sequence.num_left
        if len(tokens) < room and not self.text.looks_for_stops and sequence.stop_token_ids.isdisjoint(tokens):
            sequence.tokens += tokens
            self.text.wait(tokens)
            return tokens
        for count, token in enumerate(tokens, start=1):
            if self.append(token):
                return tokens[:count]
        return tokens

    def append(self, token: int) -> bool:
        """Add an emitted token; True if it was the last."""
        sequence = self.sequence
        sequence.tokens.append(token)
        if token in sequence.stop_token_ids:
            own = token in sequence.params.stop_token_ids
            self.finish_reason, self.stop_reason = "stop", token if own else None
        else:
            enough = sequence.num_output_tokens >= sequence.params.min_tokens
            stop = self.text.push(token, may_stop=enough)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
            elif sequence.num_output_tokens >= sequence.max_tokens:
                self.finish_reason = "length"
        return self.finish_reason is not None

    def output(self) -> CompletionOutput:
        sequence = self.sequence
        return CompletionOutput(
            index=sequence.index,
            text=self.text.text,
            token_ids=sequence.tokens[sequence.num_prompt_tokens :],
            logprobs=self.logprobs if sequence.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Completion]
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.completions)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some prompt positions are still to be reported."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def chunk(self, completion: Completion, new_tokens: list[int]) -> StreamChunk:
        first, completion.num_reported = completion.num_reported, completion.num_reported + len(new_tokens)
        return StreamChunk(
            self.request_id,
            completion.sequence.index,
            completion.text.take(),
            new_tokens,
            completion.finish_reason,
            completion.logprobs[first : completion.num_reported] if self.params.logprobs is not None else None,
        )

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs if self.params.prompt_logprobs is not None else None,
            outputs=[c.output() for c in self.completions],
            metrics=self.metrics,
            finished=self.finished,
        )
