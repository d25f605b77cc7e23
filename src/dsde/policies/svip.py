"""SVIP (arXiv 2411.18462): draft on as long as the draft is sure. Knows the entropy of its distribution, no history.

The paper bounds the acceptance probability from below by 1 - sqrt(c H) and stops where that falls under 1 - h. Its text
says sqrt(H) > h, its code sqrt(0.15 H) > 0.3, looked at after the token is drawn, which is kept. This is the code's.
"""

from __future__ import annotations

import numpy as np

from dsde.core.stops import Signal, StopAfter
from dsde.policies.base import BatchView, Plan, Policy
from dsde.policies.limits import LONGEST, check_real, check_whole


class SVIP(Policy):
    """Everybody drafts up to `max` tokens, and stops behind the first one with sqrt(c H) > h."""

    def __init__(self, h: float = 0.3, c: float = 0.15, max: int = 40) -> None:
        check_real("h", h, 0.0, 100.0)
        check_real("c", c, 1e-6, 100.0)
        check_whole("max", max, 1, LONGEST)
        self.most_entropy = h * h / c
        self.max = max

    def plan(self, batch: BatchView) -> Plan:
        count = batch.slots.size
        return Plan(
            lengths=np.minimum(self.max, batch.rooms),
            predicted=np.full(count, float(self.max)),
            votes=np.ones(count, np.bool_),
            stop=StopAfter(Signal.ENTROPY, np.full(count, self.most_entropy), stops_above=True),
        )
