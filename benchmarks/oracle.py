"""What nobody can know in time: policies that are told what will be accepted, and what the machine charges.

`Oracle` is told every sequence's acceptance rate: the limit of what history can bring. It does not know which token
will stand, nor that a rate is about to change, and it does not look at the draft's distribution: a policy that does may
be faster. For drawn agreement only. `Clairvoyant` is told which tokens will stand. It takes what pays at the rate
reached so far, step by step: a yardstick, and no proof that nothing could be faster.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsde.policies import BatchView, Outcome, Plan, Policy
from dsde.policies.base import FloatArray, IntArray
from dsde.simulation import Costs, MeasuredCosts, Requests

LONGEST = 24


class Follower(Policy):
    """Follows `simulate` through the requests: who ends is replaced by the next one."""

    def __init__(self, requests: Requests, costs: Costs | MeasuredCosts, batch_size: int) -> None:
        self.requests, self.costs = requests, costs
        self.rows, self.positions = np.arange(batch_size), np.zeros(batch_size, np.int64)
        self.num_admitted = batch_size

    def observe(self, outcome: Outcome) -> None:
        self.positions[outcome.slots] += outcome.accepted + 1

    def forget(self, slots: IntArray) -> None:
        self.rows[slots] = np.arange(self.num_admitted, self.num_admitted + slots.size) % self.requests.size
        self.positions[slots] = 0
        self.num_admitted += slots.size


class Clairvoyant(Follower):
    """Nothing is drafted that falls; the number of passes is what pays at the rate reached so far."""

    def __init__(self, requests: Requests, costs: Costs | MeasuredCosts, batch_size: int) -> None:
        super().__init__(requests, costs, batch_size)
        self.num_emitted, self.seconds = 0.0, 0.0

    def plan(self, batch: BatchView) -> Plan:
        runs = np.minimum(self.requests.runs[self.rows[batch.slots], self.positions[batch.slots]], batch.rooms)
        choices = [np.minimum(runs, longest) for longest in range(min(int(runs.max()), LONGEST) + 1)]
        emitted = [batch.slots.size + int(lengths.sum()) for lengths in choices]
        seconds = [self._seconds(lengths) for lengths in choices]
        rate = self.num_emitted / self.seconds if self.seconds else max(np.array(emitted) / seconds)
        best = int((np.array(emitted) - rate * np.array(seconds)).argmax())
        self.num_emitted, self.seconds = self.num_emitted + emitted[best], self.seconds + seconds[best]
        return Plan.wanting(choices[best], batch)

    def _seconds(self, lengths: IntArray) -> float:
        verify_s = self.costs.verify_s(lengths.size, lengths.size + int(lengths.sum()))
        return self.costs.draft_s(lengths) + float(verify_s) + self.costs.step_s


class Oracle(Follower):
    def __init__(self, requests: Requests, costs: Costs | MeasuredCosts, batch_size: int) -> None:
        assert requests.rates is not None
        super().__init__(requests, costs, batch_size)
        self.kinds, kinds_of = np.unique(requests.rates, return_inverse=True)
        self.kinds_of = kinds_of.reshape(requests.rates.shape)
        self.best = lru_cache(maxsize=None)(self._best)

    def plan(self, batch: BatchView) -> Plan:
        places = np.minimum(self.positions[batch.slots], self.kinds_of.shape[1] - 1)
        kinds = self.kinds_of[self.rows[batch.slots], places]
        counts = np.bincount(kinds, minlength=self.kinds.size)
        return Plan.wanting(np.array(self.best(tuple(counts.tolist())))[kinds], batch)

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
