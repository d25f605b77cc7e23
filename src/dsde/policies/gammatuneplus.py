"""GammaTune+ (arXiv 2504.00030): GammaTune, and no token where the draft's likeliest has little probability.

A reconstruction: `tau` is ours, the paper's is not known to us. The first token is drawn in any case, or a sequence at
its hardest would never be measured again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dsde.core.stops import Signal, StopBefore
from dsde.policies.base import BatchView, Plan
from dsde.policies.gammatune import GammaTune
from dsde.policies.limits import check_real


class GammaTunePlus(GammaTune):
    def __init__(self, tau: float = 0.3, **options: Any) -> None:
        super().__init__(**options)
        check_real("tau", tau, 0.0, 1.0)
        self.tau = float(tau)

    def plan(self, batch: BatchView) -> Plan:
        thresholds = np.full(batch.slots.size, self.tau)
        return replace(
            super().plan(batch), stop=StopBefore(Signal.TOP_PROB, thresholds, stops_above=False, first_depth=1)
        )
