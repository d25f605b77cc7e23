"""Dynamic Depth Decoding (arXiv 2409.00142) in chain form: stop when the whole draft has become unlikely.

A reconstruction: the paper looks at the mass that a beam still covers; a chain is a beam of one, whose mass is the
product of its tokens' probabilities. Knows those of the current draft, no history.
"""

from __future__ import annotations

import numpy as np

from dsde.core.stops import Stop, StopAfter, TokenSignal
from dsde.policies.base import BatchView
from dsde.policies.limits import check_real
from dsde.policies.stopping import StoppingPolicy


class DDD(StoppingPolicy):
    """Stops behind the token that takes the draft's log-probability below tau."""

    def __init__(self, tau: float = -0.6, max: int = 11) -> None:
        super().__init__(max)
        check_real("tau", tau, -1000.0, 0.0)
        self.tau = tau

    def rule(self, batch: BatchView) -> Stop:
        return StopAfter(TokenSignal.TOTAL_LOG_PROB, np.full(batch.slots.size, self.tau), stops_above=False)
