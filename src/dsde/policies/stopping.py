"""What policies have in common that draft until a rule says stop. Knows nothing of the rules.

Such a policy has no length of its own, but stages for a whole batch ask for one: it is how far a sequence's drafts went
of late. A draft that ended at its limit and not by the rule might have gone on, and counts as a little longer; or a
cap would wind itself down.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from dsde.core.stops import Stop
from dsde.policies.base import BatchView, FloatArray, IntArray, Outcome, Plan, Policy
from dsde.policies.limits import LONGEST, check_whole
from dsde.policies.slots import SlotTable

_MEMORY = 0.7
"""Share of the past in a moving average: about three drafts."""
_MORE = 2
"""tokens that a draft is taken to have had ahead of it when only its limit ended it"""


@dataclass
class _Reach(SlotTable):
    average: FloatArray = field(default_factory=lambda: np.full(1, np.nan))


class StoppingPolicy(Policy):
    """Everybody drafts up to `max` tokens, or until the rule of the policy ends it."""

    def __init__(self, max: int) -> None:
        check_whole("max", max, 1, LONGEST)
        self.max = max
        self._reach = _Reach()
        self._plan: Plan | None = None

    @abstractmethod
    def rule(self, batch: BatchView) -> Stop:
        """What ends the drafts of this batch."""

    def signals(self, batch: BatchView) -> dict[str, FloatArray]:
        """What the rule follows from, for the trace."""
        return {}

    def plan(self, batch: BatchView) -> Plan:
        self._reach.cover(batch.slots)
        reach = self._reach.average[batch.slots]
        is_known = ~np.isnan(reach)
        self._plan = Plan(
            lengths=np.minimum(self.max, batch.rooms),
            predicted=np.where(is_known, reach, float(self.max)),
            votes=is_known,
            signals=self.signals(batch),
            stop=self.rule(batch),
        )
        return self._plan

    def observe(self, outcome: Outcome) -> None:
        plan, self._plan = self._plan, None
        if plan is None or len(plan.lengths) != len(outcome.slots):
            return
        took_part = plan.lengths > 0
        slots, drafted = outcome.slots[took_part], outcome.drafted[took_part]
        went_on = drafted >= plan.lengths[took_part]
        reached = np.minimum(drafted + np.where(went_on, _MORE, 0), self.max)
        old = self._reach.average[slots]
        average = _MEMORY * old + (1 - _MEMORY) * reached
        self._reach.average[slots] = np.where(np.isnan(old), reached, average)

    def forget(self, slots: IntArray) -> None:
        self._reach.reset(slots)
