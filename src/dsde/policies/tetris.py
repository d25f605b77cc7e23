"""TETRIS (arXiv 2502.15197): only the likeliest drafted tokens of the batch are verified, so many of them.

A reconstruction: the paper scores a token by the probability that the draft gave it; a score that knows the token it
may drop is not lossless when tokens are sampled, so here it is the probability of the likeliest token, which is the
same where drafts are greedy. Knows the load by its budget alone.
"""

from __future__ import annotations

from dsde.core.selection import VerifyBudget
from dsde.core.stops import Signal
from dsde.policies.base import BatchView, Plan, Stage
from dsde.policies.limits import LARGEST_BUDGET, check_whole


class Tetris(Stage):
    """`budget` of all drafted tokens are verified, however many were drafted."""

    def __init__(self, budget: int = 64) -> None:
        check_whole("budget", budget, 0, LARGEST_BUDGET)
        self.budget = budget

    def apply(self, plan: Plan, batch: BatchView) -> None:
        plan.budget = VerifyBudget(Signal.TOP_PROB, self.budget)
