"""Stop before a token for which the draft has two candidates: one of the arms of TapOut (arXiv 2511.02017).

A reconstruction: the paper names the rule and not its threshold. Knows by how much the likeliest token leads.
"""

from __future__ import annotations

import numpy as np

from dsde.core.stops import Signal, Stop, StopBefore
from dsde.policies.base import BatchView
from dsde.policies.limits import check_real
from dsde.policies.stopping import StoppingPolicy


class Margin(StoppingPolicy):
    """Draws no token where the margin is below `least`; the first in any case."""

    def __init__(self, least: float = 0.2, max: int = 20) -> None:
        super().__init__(max)
        check_real("least", least, 0.0, 1.0)
        self.least = least

    def rule(self, batch: BatchView) -> Stop:
        thresholds = np.full(batch.slots.size, self.least)
        return StopBefore(Signal.MARGIN, thresholds, stops_above=False, first_depth=1)
