"""SVIP (arXiv 2411.18462): draft on as long as the draft is sure. Knows the entropy of its distribution, no history.

The paper bounds the acceptance probability from below by 1 - sqrt(c H) and stops where that falls under 1 - h. Its text
says sqrt(H) > h, its code sqrt(0.15 H) > 0.3, looked at after the token is drawn, which is kept. This is the code's.
"""

from __future__ import annotations

import numpy as np

from dsde.core.stops import Signal, Stop, StopAfter
from dsde.policies.base import BatchView
from dsde.policies.limits import check_real
from dsde.policies.stopping import StoppingPolicy


class SVIP(StoppingPolicy):
    """Stops behind the first token with sqrt(c H) > h."""

    def __init__(self, h: float = 0.3, c: float = 0.15, max: int = 40) -> None:
        super().__init__(max)
        check_real("h", h, 0.0, 100.0)
        check_real("c", c, 1e-6, 100.0)
        self.most_entropy = h * h / c

    def rule(self, batch: BatchView) -> Stop:
        return StopAfter(Signal.ENTROPY, np.full(batch.slots.size, self.most_entropy), stops_above=True)
