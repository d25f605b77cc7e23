"""A batch-wide cap at a percentile of the predictions, a stage for any policy. Knows predictions, not their origin.

A relative of the mean cap of DSDE: 50 is the median, which one very long prediction does not move; 100 caps nobody.
"""

from __future__ import annotations

import numpy as np

from dsde.policies.base import BatchView, Plan, Stage
from dsde.policies.limits import check_whole
from dsde.policies.rounding import round_values


class PercentileCap(Stage):
    """No voter drafts more than the given percentile of what the voters want, rounded to the nearest."""

    def __init__(self, percentile: int = 75) -> None:
        check_whole("percentile", percentile, 0, 100)
        self.percentile = percentile

    def apply(self, plan: Plan, batch: BatchView) -> None:
        if not plan.votes.any():
            return
        wanted = np.percentile(plan.predicted[plan.votes], [self.percentile])
        cap = float(round_values(wanted, "nearest")[0])
        np.minimum(plan.lengths, int(cap), out=plan.lengths, where=plan.votes)
        plan.cap = cap if plan.cap is None else min(plan.cap, cap)
