"""Stop before a token for which the draft has two candidates: one of the arms of TapOut (arXiv 2511.02017).

A reconstruction: the paper names the rule and not its threshold. Knows by how much the likeliest token leads.
"""

from __future__ import annotations

import numpy as np

from dsde.core.stops import Signal, StopBefore
from dsde.policies.base import BatchView, Plan, Policy
from dsde.policies.limits import LONGEST, check_real, check_whole


class Margin(Policy):
    """Everybody drafts up to `max` tokens, and none where the margin is below `least`; the first in any case."""

    def __init__(self, least: float = 0.2, max: int = 20) -> None:
        check_real("least", least, 0.0, 1.0)
        check_whole("max", max, 1, LONGEST)
        self.least = least
        self.max = max

    def plan(self, batch: BatchView) -> Plan:
        count = batch.slots.size
        return Plan(
            lengths=np.minimum(self.max, batch.rooms),
            predicted=np.full(count, float(self.max)),
            votes=np.ones(count, np.bool_),
            stop=StopBefore(Signal.MARGIN, np.full(count, self.least), stops_above=False, first_depth=1),
        )
