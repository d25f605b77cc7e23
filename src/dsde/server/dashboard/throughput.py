"""Tokens per second: with speculation as measured, without it as estimated from the same steps.

Plain decoding would have needed further passes for the tokens that drafts brought. What such a pass costs the policy's
cost model knows, where it has measured that size; otherwise a line through the passes seen here tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from dsde.core.outputs import StepRecord
from dsde.policies.cost import CostModel

WINDOW_S = 5.0
"""of the engine's own time"""
HORIZON = 256
"""passes that the line remembers"""


class PassLine:
    """Seconds of a target pass as a line over its tokens, older passes fading. Flat while all had one size."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        kept = 1 - 1 / HORIZON
        self._weight = kept * self._weight + 1
        self._x = kept * self._x + num_tokens
        self._y = kept * self._y + seconds
        self._xx = kept * self._xx + num_tokens**2
        self._xy = kept * self._xy + num_tokens * seconds

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def seconds(self, num_tokens: int) -> float:
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        slope = (self._xy / self._weight - x * y) / variance if variance > 1e-9 else 0.0
        # More tokens never cost less, and no pass is free.
        return y + min(max(slope, 0.0), y / x) * (num_tokens - x)


class _Step(NamedTuple):
    num_emitted: float
    step_s: float
    plain_s: float
    """in which plain decoding would have emitted as many"""


class Throughput:
    """Over the last seconds of decoding. Used by the engine's thread alone."""

    def __init__(self, cost_models: Seq[CostModel]) -> None:
        self._cost_models = cost_models
        self._line = PassLine()
        self._steps: deque[_Step] = deque()
        self._total = _Step(0.0, 0.0, 0.0)

    def observe(self, records: Seq[StepRecord]) -> None:
        """One step; `records` are of everybody who decoded in it."""
        if not records:
            return
        step = records[0]
        num_base = step.num_pass_tokens - sum(record.drafted for record in records)
        has_prompts = num_base > step.num_decoding
        if not has_prompts:
            self._line.observe(step.num_pass_tokens, step.verify_s)
        elif not self._line.is_known:
            return
        first_s = further_s = self._pass_s(step.num_decoding)
        if has_prompts:  # which plain decoding would have read as well, once
            first_s = step.verify_s * self._pass_s(num_base) / self._pass_s(step.num_pass_tokens)
        num_accepted = sum(record.accepted for record in records)
        plain_s = first_s + num_accepted / step.num_decoding * further_s
        self._add(_Step(num_accepted + len(records), step.step_s, plain_s))

    def now(self) -> tuple[float, float] | None:
        """Tokens per second with and without speculation; None before the first step."""
        num_emitted, step_s, plain_s = self._total
        return (num_emitted / step_s, num_emitted / plain_s) if step_s > 0 and plain_s > 0 else None

    def _add(self, step: _Step) -> None:
        self._steps.append(step)
        self._total = _Step(*(a + b for a, b in zip(self._total, step, strict=True)))
        while self._total.step_s > WINDOW_S and len(self._steps) > 1:
            self._total = _Step(*(a - b for a, b in zip(self._total, self._steps.popleft(), strict=True)))

    def _pass_s(self, num_tokens: int) -> float:
        for model in self._cost_models:
            if model.num_verified(num_tokens):
                return float(model.verify_s(num_tokens))
        return self._line.seconds(num_tokens)
