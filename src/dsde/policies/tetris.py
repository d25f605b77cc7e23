"""TETRIS (arXiv 2502.15197): everybody drafts, and only the likeliest drafted tokens of the batch are verified.

A reconstruction: the paper scores a token by the probability that the draft gave it; a score that knows the token it
may drop is not lossless when tokens are sampled, so here it is the probability of the likeliest token, which is the
same where drafts are greedy. Knows the load by its budget alone.
"""

from __future__ import annotations

import numpy as np

from dsde.core.selection import VerifyBudget
from dsde.core.stops import Signal
from dsde.policies.base import BatchView, Plan, Policy
from dsde.policies.limits import LONGEST, check_whole

_LARGEST_BUDGET = 1 << 20


class Tetris(Policy):
    """Everybody drafts `length` tokens; `budget` of all of them are verified."""

    def __init__(self, budget: int = 64, length: int = 4) -> None:
        check_whole("budget", budget, 0, _LARGEST_BUDGET)
        check_whole("length", length, 0, LONGEST)
        self.budget = VerifyBudget(Signal.TOP_PROB, budget)
        self.length = length

    def plan(self, batch: BatchView) -> Plan:
        return Plan(
            lengths=np.minimum(self.length, batch.rooms),
            predicted=np.full(batch.slots.size, float(self.length)),
            votes=np.ones(batch.slots.size, np.bool_),
            budget=self.budget,
        )
