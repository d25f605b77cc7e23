"""Begins with a few where the draft has much to read: what comes of theirs tells whether the others are worth reading.

Whoever begins to draft goes by what was found before, of other requests as a rule. If that is not true any more, what
was read for everybody was read for nothing. So at first no more is read than takes as long as a few steps without
drafts, and every time that what was hoped for came of it twice as much. Knows nothing of chances.
"""

from __future__ import annotations

import numpy as np

from dsde.policies.base import BatchView, IntArray
from dsde.policies.cost import CostModel

FIRST = 5.0
"""steps without drafts, that reading may take as long as in the first wave"""
HOPED = 0.75
"""share of the tokens expected to stand, that have to before more is read"""
NUM_IN_PASSING = 2
"""tokens that a draft reads beside the newest without taking longer"""


class Waves:
    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._size = FIRST
        self.is_open = False
        """whether there is one of which it is not known yet what came of it"""

    def limit(self, batch: BatchView, lengths: IntArray, is_doubtful: bool) -> tuple[IntArray, IntArray]:
        """[batch] the lengths of those who may draft now, the same if nobody has to wait, and the slots of those among
        them that are a wave. Those with the most to read wait, and where drafts do not seem to pay all who have much.
        """
        behind = np.where(lengths > 0, self.cost.behind(batch.slots), 0)
        behind = np.where(behind > NUM_IN_PASSING, behind, 0)
        nobody = batch.slots[:0]
        step_s = float(self.cost.verify_s(batch.num_sequences))
        if float(self.cost.catch_up_s(behind.sum())) <= FIRST * step_s:
            self._size = FIRST  # all who were to be read have been
            if not (behind.any() and (is_doubtful or self.is_open)):
                return lengths, nobody
        order = np.argsort(behind, kind="stable")
        num = int(np.count_nonzero(behind == 0))
        if not (is_doubtful or self.is_open):
            reading_s = self.cost.catch_up_s(np.add.accumulate(behind[order]))
            # Somebody reads, however much it is.
            num = max(int(np.searchsorted(reading_s, self._size * step_s, side="right")), num + 1)
            if num == lengths.size:
                return lengths, nobody
        limited = np.zeros_like(lengths)
        limited[order[:num]] = lengths[order[:num]]
        return limited, batch.slots[(behind > 0) & (limited > 0)]

    def begin(self) -> None:
        """One is under way."""
        self.is_open = True

    def drop(self) -> None:
        """Nothing will come of it."""
        self.is_open = False

    def widen(self) -> None:
        """Nothing could be read for it, perhaps as there is no memory: others need not wait for that."""
        self._size, self.is_open = 2 * self._size, False

    def end(self, num_accepted: float, num_expected: float) -> None:
        """It is known what came of it."""
        self.is_open = False
        self._size = 2 * self._size if num_accepted >= HOPED * num_expected else FIRST

    def reset(self) -> None:
        """Nobody drafts any more."""
        self._size, self.is_open = FIRST, False
