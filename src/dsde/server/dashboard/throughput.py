"""Tokens per second: with speculation as measured, without it as estimated from the same steps.

Plain decoding would have read fewer tokens in a pass and needed further passes for what drafts brought. What a pass of
another size costs the policy's cost model knows, where it has measured plain decoding; otherwise a line through the
passes seen here tells. Either way it is scaled by how long this very step took: whatever held it up would have held up
plain decoding as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from statistics import median
from typing import NamedTuple

from dsde.core.outputs import StepRecord
from dsde.policies.cost import CostModel

WINDOW_S = 5.0
"""of the engine's own time"""
LEAST_STEPS = 8
"""before anything is said"""
NUM_HELD = 15
"""newest passes of every size"""
NUM_TRUSTED = 5
"""passes of a size after which it speaks for itself"""
MOST_SIZES = 48
"""those seen last"""
PACE_SHARE = 1 / 64
"""of the newest pass in the pace"""


class _Size:
    """Passes over as many tokens."""

    def __init__(self) -> None:
        self.held: deque[float] = deque(maxlen=NUM_HELD)
        self.typical = 0.0

    def add(self, cost: float) -> None:
        self.held.append(cost)
        self.typical = median(self.held)


class PassLine:
    """What a target pass costs beside others: the median of its size, or a line through those of other sizes.

    Costs are seconds over the pace of their time: a size that was last seen while the machine was busy can be compared
    with one seen while it was not.
    """

    def __init__(self) -> None:
        self._pace = 0.0
        self._sizes: dict[int, _Size] = {}
        """the one seen last at the end"""

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    def observe(self, num_tokens: int, seconds: float) -> None:
        pace = seconds / (self.cost(num_tokens) if self.is_known else 1.0)
        self._pace += (pace - self._pace) * (PACE_SHARE if self.is_known else 1.0)
        size = self._sizes.pop(num_tokens, None) or _Size()
        size.add(seconds / self._pace)
        self._sizes[num_tokens] = size
        if len(self._sizes) > MOST_SIZES:
            del self._sizes[next(iter(self._sizes))]

    def cost(self, num_tokens: int) -> float:
        """Only the ratio of two of them means something."""
        if (size := self._sizes.get(num_tokens)) is not None and len(size.held) >= NUM_TRUSTED:
            return size.typical
        points = [(len(size.held), tokens, size.typical) for tokens, size in self._sizes.items()]
        weight = sum(w for w, _, _ in points)
        x, y = sum(w * tokens for w, tokens, _ in points) / weight, sum(w * cost for w, _, cost in points) / weight
        variance = sum(w * (tokens - x) ** 2 for w, tokens, _ in points)
        slope = sum(w * (tokens - x) * (cost - y) for w, tokens, cost in points) / variance if variance else 0.0
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
        if num_base == step.num_decoding:  # nobody's prompt was read beside
            self._line.observe(step.num_pass_tokens, step.verify_s)
        elif not self._line.is_known:
            return
        cost = self._cost(step.num_decoding)
        first, further = (cost(size) / cost(step.num_pass_tokens) for size in (num_base, step.num_decoding))
        num_accepted = sum(record.accepted for record in records)
        plain_s = step.verify_s * (first + num_accepted / step.num_decoding * further)
        self._add(_Step(num_accepted + len(records), step.step_s, plain_s))

    def now(self) -> tuple[float, float] | None:
        """Tokens per second with and without speculation; None while there is too little to go by."""
        num_emitted, step_s, plain_s = self._total
        if len(self._steps) < LEAST_STEPS or not (step_s > 0 and plain_s > 0):
            return None
        return num_emitted / step_s, num_emitted / plain_s

    def _add(self, step: _Step) -> None:
        self._steps.append(step)
        self._total = _Step(*(a + b for a, b in zip(self._total, step, strict=True)))
        while self._total.step_s > WINDOW_S and len(self._steps) > 1:
            self._total = _Step(*(a - b for a, b in zip(self._total, self._steps.popleft(), strict=True)))

    def _cost(self, num_decoding: int) -> Callable[[int], float]:
        """Of a pass over so many tokens."""
        for model in self._cost_models:
            if model.num_verified(num_decoding):
                return lambda num_tokens: float(model.verify_s(num_tokens))
        return self._line.cost
