"""The batch-wide cap of DSDE (arXiv 2509.01083), as a stage for any policy. Knows predictions, not their origin.

One draft step costs about the same however many sequences take part, so a few long drafts make everybody wait. The mean
of the predicted lengths is the cap with the least mean squared distance to all of them.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from dsde.policies.base import BatchView, Plan, Stage
from dsde.policies.limits import check_choice
from dsde.policies.rounding import Rounding, round_values


class MeanCap(Stage):
    """No voter drafts more than the mean prediction of the voters.

    `nearest` rounds the mean of the real-valued predictions; `ceil` is the released code's: it takes the mean of the
    predictions already rounded up, and rounds it up again.
    """

    def __init__(self, rounding: Rounding = "nearest") -> None:
        check_choice("rounding", rounding, get_args(Rounding))
        self.rounding: Rounding = rounding

    def apply(self, plan: Plan, batch: BatchView) -> None:
        if not plan.votes.any():
            return
        wanted = plan.predicted[plan.votes]
        if self.rounding == "ceil":
            wanted = np.ceil(wanted)
        cap = float(round_values(wanted.mean(keepdims=True), self.rounding)[0])
        np.minimum(plan.lengths, int(cap), out=plan.lengths, where=plan.votes)
        plan.cap = cap if plan.cap is None else min(plan.cap, cap)
