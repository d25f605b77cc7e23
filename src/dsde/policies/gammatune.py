"""GammaTune: lengths from a moving average of accepted tokens, with jumps after success (arXiv 2504.00030).

A reconstruction from descriptions of the paper: `eta`, `delta` and the range are a re-implementer's values. Knows, of
every sequence, how many tokens were accepted. Does not know load or time, and never stops speculation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.policies.base import BatchView, FloatArray, IntArray, Outcome, Plan, Policy
from dsde.policies.limits import LONGEST, check_real, check_whole
from dsde.policies.slots import SlotTable


@dataclass
class _Sequences(SlotTable):
    gamma: IntArray
    """length wanted next"""
    gamma_bar: FloatArray
    """moving average of the tokens accepted in drafts that were not accepted whole"""


class GammaTune(Policy):
    """All accepted: gamma = accepted + delta. Else: gamma = the moving average of accepted, rounded up."""

    def __init__(self, initial: int = 4, *, eta: float = 0.3, delta: int = 2, min: int = 1, max: int = 10) -> None:
        check_whole("initial", initial, 1, LONGEST)
        check_real("eta", eta, 0, 1)
        check_whole("delta", delta, 1, LONGEST)
        # A sequence that drafts nothing has nothing accepted, so a minimum of 0 could never be left again.
        check_whole("min", min, 1, LONGEST)
        check_whole("max", max, min, LONGEST)
        self.initial, self.eta, self.delta, self.min, self.max = initial, float(eta), delta, min, max
        first = np.clip(np.array([initial], np.int64), min, max)
        self._sequences = _Sequences(first, first.astype(np.float64))

    def plan(self, batch: BatchView) -> Plan:
        self._sequences.cover(batch.slots)
        gamma = self._sequences.gamma[batch.slots]
        return Plan.wanting(gamma, batch, gamma_bar=self._sequences.gamma_bar[batch.slots])

    def observe(self, outcome: Outcome) -> None:
        active = outcome.drafted > 0
        slots, drafted, accepted = outcome.slots[active], outcome.drafted[active], outcome.accepted[active]
        self._sequences.cover(slots)
        succeeded = accepted == drafted
        self._raise(slots[succeeded], accepted[succeeded])
        self._average(slots[~succeeded], accepted[~succeeded])

    def forget(self, slots: IntArray) -> None:
        self._sequences.reset(slots)

    def _raise(self, slots: IntArray, accepted: IntArray) -> None:
        gamma = self._sequences.gamma
        # Never down: a draft cut short by its room or by a stage was not rejected.
        gamma[slots] = np.maximum(gamma[slots], np.minimum(accepted + self.delta, self.max))

    def _average(self, slots: IntArray, accepted: IntArray) -> None:
        before = self._sequences.gamma_bar[slots]
        # Written so that an average equal to `accepted` stays exactly there, and is not rounded up to the next length.
        gamma_bar = np.clip(before + self.eta * (accepted - before), self.min, self.max)
        self._sequences.gamma_bar[slots] = gamma_bar
        self._sequences.gamma[slots] = np.ceil(gamma_bar).astype(np.int64)
