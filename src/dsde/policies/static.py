"""The same length for every sequence at every step. Knows the room of a sequence, learns nothing."""

from __future__ import annotations

from dsde.policies.base import BatchView, Plan, Policy
from dsde.policies.limits import LONGEST, check_whole


class Static(Policy):
    """Everybody drafts `length` tokens, fewer only where there is no room for them."""

    def __init__(self, length: int) -> None:
        check_whole("length", length, 0, LONGEST)
        self.length = length

    def plan(self, batch: BatchView) -> Plan:
        return Plan.wanting(self.length, batch)
