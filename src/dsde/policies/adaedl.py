"""AdaEDL (arXiv 2410.18351): stop before a token whose acceptance looks too unlikely, by a threshold that adapts.

Knows the entropy of the draft's distribution, and of every sequence how much was accepted. A reconstruction from two
independent descriptions of the paper: stop where 1 - sqrt(gamma H) < lambda; after a round AR is the moving average of
accepted over drafted, lambda rises by epsilon where AR is below alpha, falls by epsilon where it is not and the draft
did not reach its limit fully accepted, and is smoothed itself. The first token is drawn in any case: a round without
one would teach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dsde.core.stops import Signal, Stop, StopBefore
from dsde.policies.base import BatchView, FloatArray, IntArray, Outcome
from dsde.policies.limits import check_real
from dsde.policies.slots import SlotTable
from dsde.policies.stopping import StoppingPolicy


@dataclass
class _State(SlotTable):
    thresholds: FloatArray
    """lambda"""
    acceptance: FloatArray = field(default_factory=lambda: np.ones(1))
    """AR"""


class AdaEDL(StoppingPolicy):
    def __init__(
        self,
        gamma: float = 0.2,
        max: int = 7,
        threshold: float = 0.5,
        alpha: float = 0.9,
        epsilon: float = 0.01,
        beta1: float = 0.5,
        beta2: float = 0.9,
    ) -> None:
        super().__init__(max)
        check_real("gamma", gamma, 1e-6, 100.0)
        for name, value in (("threshold", threshold), ("alpha", alpha), ("beta1", beta1), ("beta2", beta2)):
            check_real(name, value, 0.0, 1.0)
        check_real("epsilon", epsilon, 0.0, 1.0)
        self.gamma, self.alpha, self.epsilon = gamma, alpha, epsilon
        self.beta1, self.beta2 = beta1, beta2
        self._state = _State(np.full(1, threshold), np.full(1, alpha))

    def signals(self, batch: BatchView) -> dict[str, FloatArray]:
        self._state.cover(batch.slots)
        return {"lambda": self._state.thresholds[batch.slots], "AR": self._state.acceptance[batch.slots]}

    def rule(self, batch: BatchView) -> Stop:
        self._state.cover(batch.slots)
        thresholds = self._state.thresholds[batch.slots]
        # 1 - sqrt(gamma H) < lambda  <=>  H > (1 - lambda)^2 / gamma, for lambda below 1; beyond it everything stops.
        most_entropy = np.where(thresholds < 1, (1 - thresholds) ** 2 / self.gamma, -1.0)
        return StopBefore(Signal.ENTROPY, most_entropy, stops_above=True, first_depth=1)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        told = outcome.drafted > 0
        slots, drafted, accepted = outcome.slots[told], outcome.drafted[told], outcome.accepted[told]
        state = self._state
        state.cover(slots)
        rate = self.beta1 * state.acceptance[slots] + (1 - self.beta1) * accepted / drafted
        old = state.thresholds[slots]
        step = np.where(rate < self.alpha, self.epsilon, np.where(accepted != self.max, -self.epsilon, 0.0))
        state.acceptance[slots] = rate
        state.thresholds[slots] = self.beta2 * old + (1 - self.beta2) * (old + step)

    def forget(self, slots: IntArray) -> None:
        super().forget(slots)
        self._state.reset(slots)
