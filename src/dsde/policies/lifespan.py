"""How many tokens a request may be expected to have yet, from how many others had. Knows nothing of texts.

Whether it is worth having a draft read a prompt depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.policies.base import BatchView, BoolArray, FloatArray, IntArray, Outcome
from dsde.policies.slots import SlotTable

MEMORY = 16.0
"""requests after which one counts about a third"""
YOUNG = 0.25
"""share of what requests may be expected to have yet; who has had less has come of late"""


@dataclass
class _Sequences(SlotTable):
    num_emitted: IntArray
    most: IntArray
    """tokens that it might have when it was first seen"""
    is_there: BoolArray


class Lifespan:
    """Requests are taken to end at any token alike: whatever one has had, it is expected to have as many as the mean of
    those that have ended, and no more than it may have. Before any has ended there is only that. Where nobody knows how
    many a request may have, nobody counts what it has had, either, and it lasts for ever."""

    def __init__(self) -> None:
        self._mean = np.inf
        self._num_ended = 0
        self._sequences = _Sequences(
            num_emitted=np.zeros(1, np.int64), most=np.zeros(1, np.int64), is_there=np.zeros(1, np.bool_)
        )

    def is_new(self, slots: IntArray) -> BoolArray:
        """[slots] who has got no tokens yet."""
        self._sequences.cover(slots)
        is_new: BoolArray = ~self._sequences.is_there[slots]
        return is_new

    def see(self, slots: IntArray, num_left: IntArray | None = None) -> BoolArray:
        """These are about to get tokens, so many more at most; [slots] whether for the first time."""
        is_new, sequences = self.is_new(slots), self._sequences
        sequences.is_there[slots] = True
        if num_left is not None:
            # What it may have no more it has had: some engines do not tell of every step.
            sequences.most[slots] = np.where(is_new, num_left, sequences.most[slots])
            sequences.num_emitted[slots] = sequences.most[slots] - num_left
        return is_new

    def observe(self, outcome: Outcome) -> None:
        self._sequences.cover(outcome.slots)
        emitted = outcome.accepted + outcome.num_steps if outcome.num_emitted is None else outcome.num_emitted
        self._sequences.num_emitted[outcome.slots] += emitted

    def forget(self, slots: IntArray) -> None:
        """These have ended. A step that was under way by then may still be observed, and they forgotten once more."""
        self._sequences.cover(slots)
        is_there = self._sequences.is_there[slots]
        for num_emitted in self._sequences.num_emitted[slots[is_there]].tolist():
            if num_emitted:
                self._num_ended += 1
                known = 0.0 if self._num_ended == 1 else self._mean
                self._mean = known + (num_emitted - known) / min(self._num_ended, MEMORY)
        self._sequences.reset(slots)

    def num_coming(self, batch: BatchView) -> FloatArray:
        """[batch] tokens of each, and of those who will come in its place, and in theirs: as many places are taken by
        others, one by one, as were of late. Where all came together, all will end before others come."""
        left = self.num_left(batch)
        typical = float(np.mean(left)) if left.size else np.inf
        if not np.isfinite(typical) or not np.isfinite(self._mean):
            return left
        num_young = int(np.count_nonzero(self._sequences.num_emitted[batch.slots] < YOUNG * typical))
        followed = num_young / (YOUNG * left.size)
        share = min(followed, 1 / max(followed, 1e-9))
        return left + self._mean * (share / (1 - share) if share < 1 else np.inf)

    def num_left(self, batch: BatchView) -> FloatArray:
        """[batch]"""
        if batch.num_left is None:
            return np.full(batch.slots.size, np.inf)
        left: FloatArray = np.minimum(batch.num_left.astype(np.float64), self._mean)
        return left
