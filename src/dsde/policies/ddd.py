"""Dynamic Depth Decoding (arXiv 2409.00142) in chain form: stop when the whole draft has become unlikely.

A reconstruction: the paper looks at the mass that a beam still covers; a chain is a beam of one, whose mass is the
product of its tokens' probabilities. Knows those of the current draft, no history.
"""

from __future__ import annotations

import numpy as np

from dsde.core.stops import StopAfter, TokenSignal
from dsde.policies.base import BatchView, Plan, Policy
from dsde.policies.limits import LONGEST, check_real, check_whole


class DDD(Policy):
    """Everybody drafts up to `max` tokens, and stops behind the one that takes its log-probability below tau."""

    def __init__(self, tau: float = -0.6, max: int = 11) -> None:
        check_real("tau", tau, -1000.0, 0.0)
        check_whole("max", max, 1, LONGEST)
        self.tau = tau
        self.max = max

    def plan(self, batch: BatchView) -> Plan:
        count = batch.slots.size
        return Plan(
            lengths=np.minimum(self.max, batch.rooms),
            predicted=np.full(count, float(self.max)),
            votes=np.ones(count, np.bool_),
            stop=StopAfter(TokenSignal.TOTAL_LOG_PROB, np.full(count, self.tau), stops_above=False),
        )
