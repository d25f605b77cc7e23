"""Looking again while nobody drafts: a small share of the time pays for a short draft now and then.

Without it, a policy that has stopped drafting would never learn that it should begin again. Knows nothing of what is
learnt from a probe.
"""

from __future__ import annotations

import numpy as np

from dsde.policies.base import BatchView
from dsde.policies.cost import CostModel, StepCost

SHARE = 0.01
"""of the time without speculation, that may go into probes"""
MOST_STEPS = 2.0
"""without drafts, that a probe is taken to cost at most"""
NUM_TOKENS = 4
"""tested by a probe, at least, over the batch"""


class Probe:
    def __init__(self, cost: CostModel, max_length: int) -> None:
        self.cost = cost
        self.max_length = max_length
        self.is_under_way = False
        self._saved_s = 0.0
        self._price_s = 0.0

    def length(self, batch: BatchView) -> int:
        """For everybody."""
        return min(-(-NUM_TOKENS // batch.slots.size), self.max_length)

    def begin(self, batch: BatchView, num_tried: int = 0) -> bool:
        """Whether enough time is set aside for a short draft, as if nothing of it were accepted.

        A size that was not verified `num_tried` times yet is tried on credit: what is thought of it may be wrong.
        """
        self.is_under_way = False
        if batch.rooms.any():
            self._price_s = self._cost_s(batch)
            self._saved_s = min(self._saved_s, 2 * self._price_s)
            num_tokens = batch.num_plain_tokens + int(np.minimum(self.length(batch), batch.rooms).sum())
            self.is_under_way = self._saved_s >= self._price_s or self.cost.num_verified(num_tokens) < num_tried
        return self.is_under_way

    def num_steps_left(self, plain_s: float) -> int:
        """Steps of so many seconds, without drafts, until there is enough for such a probe as was asked for last."""
        return max(int((self._price_s - self._saved_s) / (SHARE * plain_s)), 0)

    def save(self, plain_s: float) -> None:
        """A step without drafts took so long."""
        self._saved_s += SHARE * plain_s

    def end(self, step: StepCost, plain_s: float) -> None:
        """The step that was one took this, and would have taken `plain_s` without."""
        self._saved_s -= max(step.draft_s + step.catch_up_s + step.verify_s - plain_s, 0.0)
        self.is_under_way = False

    def _cost_s(self, batch: BatchView) -> float:
        num, length = batch.slots.size, self.length(batch)
        base = batch.num_plain_tokens
        verify_s = self.cost.verify_s([base, base + int(np.minimum(length, batch.rooms).sum())])
        catch_up_s = float(self.cost.catch_up_s(self.cost.num_behind(batch.slots)))
        price_s = self.cost.drafting_s(length * num, length) + float(verify_s[1] - verify_s[0]) + catch_up_s
        # However dear it looks: that may be what is wrong. What it does cost is paid for afterwards.
        return min(price_s, MOST_STEPS * float(verify_s[0]))
