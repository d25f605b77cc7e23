"""How a request wants its tokens drawn. Knows nothing of models: token ids are checked by the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from dsde.core.errors import InvalidInput

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less only loses precision."""

DEFAULT_POLICY = "auto"
"""Who chooses how many tokens are drafted, where nobody says otherwise."""

LONGEST_DRAFT = 128
"""Most tokens that anybody may ask to be drafted in one step."""
MOST_COMPLETIONS = 1024
PENALTY_RANGE = (0.01, 100.0)
"""of repetition_penalty: logits multiplied or divided by more would no longer be finite"""
LEAST_TPOT_MS = 0.001

Speculation = Literal["on", "off"] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything a request may ask of sampling. All of it is exact under speculation, at every drafted position.

    Logits are changed in this order: logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p.
    """

    n: int = 1
    """completions of the same prompt"""
    max_tokens: int | None = 256
    """None: until the context is full"""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy"""
    top_k: int = 0
    """0 or -1: all tokens"""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    """With a seed the text depends on the seed alone: not on the batch, the policy, the draft or the schedule."""
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    """how many of the most likely tokens to report at every position, besides the chosen one"""
    prompt_logprobs: int | None = None
    speculation: Speculation = "on"
    """"on": the policy chooses; "off": never draft for this request; a number: always draft that many"""
    slo_tpot_ms: float | None = None
    """milliseconds a token, after the first, that the request should take; for policies that look at it"""

    def __post_init__(self) -> None:
        for name, empty in (("logit_bias", {}), ("stop", []), ("stop_token_ids", [])):
            if getattr(self, name) is None:  # as other libraries write "none of it"
                object.__setattr__(self, name, empty)
        self._check_whole("n", self.n, 1, MOST_COMPLETIONS)
        if self.max_tokens is not None:
            self._check_whole("max_tokens", self.max_tokens, 1)
        self._check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}.")
        self._check_real("temperature", self.temperature, 0.0, math.inf)
        self._check_whole("top_k", self.top_k, -1)
        self._check_real("top_p", self.top_p, 0.0, 1.0, open_below=True)
        self._check_real("min_p", self.min_p, 0.0, 1.0)
        self._check_real("repetition_penalty", self.repetition_penalty, *PENALTY_RANGE)
        self._check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_bias()
        if self.seed is not None:
            self._check_whole("seed", self.seed, -(2**63), 2**64 - 1)
        self._check_stop()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_whole(name, getattr(self, name), 0)
        if self.speculation not in ("on", "off"):
            if isinstance(self.speculation, str):
                raise InvalidInput(f'speculation must be "on", "off" or a whole number, got "{self.speculation}".')
            self._check_whole("speculation", self.speculation, 0, LONGEST_DRAFT)
        if self.slo_tpot_ms is not None:
            self._check_real("slo_tpot_ms", self.slo_tpot_ms, LEAST_TPOT_MS, math.inf)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @staticmethod
    def _check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"between {low} and {high}"
            raise InvalidInput(f"{name} must be a whole number {allowed}, got {value!r}.")

    @staticmethod
    def _check_real(name: str, value: object, low: float, high: float, open_below: bool = False) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value > high or value < low or (open_below and value == low):  # type: ignore[arg-type, operator]
            below = f"above {low:g}" if open_below else f"at least {low:g}"
            above = "" if high == math.inf else f" and at most {high:g}"
            raise InvalidInput(f"{name} must be a finite number {below}{above}, got {value!r}.")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, dict):
            raise InvalidInput(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.")
        for token, bias in self.logit_bias.items():
            self._check_whole("a token id of logit_bias", token, 0)
            self._check_real(f"logit_bias of token {token}", bias, -100.0, 100.0)

    def _check_stop(self) -> None:
        if not isinstance(self.stop, str | list) or any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise InvalidInput(f"stop must be a non-empty string or a list of them, got {self.stop!r}.")
        if not isinstance(self.stop_token_ids, list):
            raise InvalidInput(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}.")
        for token in self.stop_token_ids:
            self._check_whole("a token id of stop_token_ids", token, 0)
