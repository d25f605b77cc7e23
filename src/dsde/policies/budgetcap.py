"""A budget of drafted tokens for the whole batch, a stage for any policy. Knows lengths, not what a token costs."""

from __future__ import annotations

import numpy as np

from dsde.policies.base import BatchView, IntArray, Plan, Stage
from dsde.policies.limits import LARGEST_BUDGET, check_whole


class BudgetCap(Stage):
    """The batch drafts at most `tokens` tokens a step: the longest drafts are lowered first, to one common length.

    What the common length leaves over goes, a token each, to those who want most. Whoever does not vote (a calibrating
    sequence) is lowered only where the budget would not do even if all voters drafted nothing.
    """

    def __init__(self, tokens: int) -> None:
        check_whole("tokens", tokens, 0, LARGEST_BUDGET)
        self.tokens = tokens

    def apply(self, plan: Plan, batch: BatchView) -> None:
        if int(plan.lengths.sum()) <= self.tokens:
            return
        # Bound by the budget are the voters; the others only by what is left when the voters have given all they can.
        left = self.tokens - int(plan.lengths[~plan.votes].sum())
        bound = plan.votes if left >= 0 else ~plan.votes
        if left < 0:
            plan.lengths[plan.votes] = 0
            left = self.tokens
        lowered = _share(plan.lengths[bound], plan.predicted[bound], left)
        plan.lengths[bound] = lowered
        cap = float(lowered.max(initial=0))
        plan.cap = cap if plan.cap is None else min(plan.cap, cap)


def _share(lengths: IntArray, predicted: np.ndarray[tuple[int, ...], np.dtype[np.float64]], budget: int) -> IntArray:
    """Lengths lowered from the longest until they sum to the budget."""
    shortest_first = np.sort(lengths)
    num = lengths.size
    # What is spent when everybody is lowered to the length of the i-th shortest.
    spent = np.add.accumulate(shortest_first) + shortest_first * np.arange(num - 1, -1, -1)
    num_kept = int(np.searchsorted(spent, budget, side="right"))
    if num_kept == num:
        return lengths
    rest = budget - int(shortest_first[:num_kept].sum())
    level, num_longer = divmod(rest, num - num_kept)
    lowered = np.minimum(lengths, level)
    longer = np.flatnonzero(lengths > level)
    most_wanted = longer[np.argsort(-predicted[longer], kind="stable")[:num_longer]]
    lowered[most_wanted] += 1
    return lowered
