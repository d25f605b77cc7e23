"""What nobody can know in time: a policy that is told every sequence's acceptance rate and what the machine charges.

The limit of what history can bring. It does not know which token will stand, nor that a rate is about to change, and it
does not look at the draft's distribution: a policy that does may be faster. For simulations with drawn agreement only.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsde.policies import BatchView, Outcome, Plan, Policy
from dsde.policies.base import FloatArray, IntArray
from dsde.simulation import Costs, MeasuredCosts, Requests

LONGEST = 24


class Oracle(Policy):
    """Follows `simulate` through the requests: who ends is replaced by the next one."""

    def __init__(self, requests: Requests, costs: Costs | MeasuredCosts, batch_size: int) -> None:
        assert requests.rates is not None
        self.kinds, kinds_of = np.unique(requests.rates, return_inverse=True)
        self.kinds_of = kinds_of.reshape(requests.rates.shape)
        self.num_requests = requests.size
        self.costs = costs
        self.rows, self.positions = np.arange(batch_size), np.zeros(batch_size, np.int64)
        self.num_admitted = batch_size
        self.best = lru_cache(maxsize=None)(self._best)

    def plan(self, batch: BatchView) -> Plan:
        places = np.minimum(self.positions[batch.slots], self.kinds_of.shape[1] - 1)
        kinds = self.kinds_of[self.rows[batch.slots], places]
        counts = np.bincount(kinds, minlength=self.kinds.size)
        return Plan.wanting(np.array(self.best(tuple(counts.tolist())))[kinds], batch)

    def observe(self, outcome: Outcome) -> None:
        self.positions[outcome.slots] += outcome.accepted + 1

    def forget(self, slots: IntArray) -> None:
        self.rows[slots] = np.arange(self.num_admitted, self.num_admitted + slots.size) % self.num_requests
        self.positions[slots] = 0
        self.num_admitted += slots.size

    def _best(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """[kinds] the lengths with the most tokens a second, where so many sequences are of each kind.

        Tokens likelier than some level, in so many passes: every level and every number of passes is tried.
        """
        members, num = np.array(counts), sum(counts)
        depths = np.arange(1, LONGEST + 1)
        chances = np.minimum(self.kinds, 0.999)[:, None] ** depths
        best, best_lengths = num / self._seconds(np.zeros_like(members), members), np.zeros_like(members)
        for level in np.unique(chances[members > 0]):
            wanted = (chances >= level).sum(axis=1)
            for longest in range(1, int(wanted.max()) + 1):
                lengths = np.minimum(wanted, longest)
                gained = (members * (chances * (depths <= lengths[:, None])).sum(axis=1)).sum()
                speed = (num + gained) / self._seconds(lengths, members)
                if speed > best:
                    best, best_lengths = speed, lengths
        return tuple(best_lengths.tolist())

    def _seconds(self, lengths: IntArray, members: IntArray) -> FloatArray:
        num = int(members.sum())
        draft_s = self.costs.draft_s(np.repeat(lengths, members))
        seconds: FloatArray = draft_s + self.costs.verify_s(num, num + int((lengths * members).sum()))
        return seconds + self.costs.step_s
