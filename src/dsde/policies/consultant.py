"""Consultant Decoding as a stage: drafted tokens stand if the target finds them likely enough. NOT lossless.

A reconstruction from a description of the paper: r <- b r + (1 - b) (-log p(x)) along the draft, a token stands while
r <= epsilon, and what follows a fallen one is drawn from p itself. The average goes on over steps and begins anew after
a rejection. Changes what is accepted and nothing else: lengths are left alone. Knows nothing of probabilities.
"""

from __future__ import annotations

from dsde.core.consultant import Consultant
from dsde.policies.base import BatchView, Plan, Stage
from dsde.policies.limits import check_real


class ConsultantStage(Stage):
    def __init__(self, epsilon: float = 2.0, decay: float = 0.2) -> None:
        check_real("epsilon", epsilon, 0.0, 1000.0)
        check_real("decay", decay, 0.0, 0.999)
        self.rule = Consultant(float(epsilon), float(decay))

    def apply(self, plan: Plan, batch: BatchView) -> None:
        plan.consultant = self.rule
