"""How likely a drafted token is to stand, learnt from every verification: a logistic regression that never stops.

A position's log-odds are linear in what the draft's distribution looks like there (square root of the entropy, top
probability, margin: shared by all requests) plus an offset of its sequence, which holds what the distribution does not
tell: it is drawn towards zero, that is towards everybody's, while little is known of the sequence or it was long ago.
Only positions up to the first rejection are learnt from; those behind it were never tested. Knows nothing of costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.policies.base import FloatArray, IntArray, Outcome
from dsde.policies.slots import SlotTable

NUM_LOOKS = 3
PRIOR_WEIGHTS = np.array([0.5, -1.0, 1.0, 3.0])
"""intercept, root of the entropy, top probability, margin: sure drafts are accepted, others as by a coin"""
PRIOR_PRECISION = 1.0
"""of each of them: worth about ten tokens"""
MEMORY = 4096.0
"""tested tokens, of all requests, after which what the weights were learnt from counts about a third"""
SEQUENCE_MEMORY = 24.0
"""the same of one sequence's own: a request that turns from prose to code is another one soon"""
OFFSET_PRECISION = 2.0
"""of a sequence's offset before it has been tested: most lie within a unit of log-odds"""
PRIOR_RATE, PRIOR_TESTED = 0.7, 8.0
"""chance of a position that nobody has looked at, and how many tested tokens outweigh it"""


@dataclass
class _Sequences(SlotTable):
    pulls: FloatArray
    """fading sums: information on the offset times the offset it speaks for"""
    information: FloatArray
    num_accepted: FloatArray
    """fading sums, like the next"""
    num_tested: FloatArray


class AcceptanceModel:
    def __init__(self) -> None:
        self.weights = PRIOR_WEIGHTS.copy()
        self._information = np.eye(1 + NUM_LOOKS) * PRIOR_PRECISION
        self._num_accepted, self._num_tested = PRIOR_RATE * PRIOR_TESTED, PRIOR_TESTED
        self._sequences = _Sequences(*(np.zeros(1) for _ in range(4)))

    @property
    def rate(self) -> float:
        """Of tested tokens that stood, lately, over all requests."""
        return self._num_accepted / self._num_tested

    def offsets(self, slots: IntArray) -> FloatArray:
        """Log-odds of a position of these sequences before one looks at it."""
        self._sequences.cover(slots)
        offsets: FloatArray = self.weights[0] + self._own(slots)
        return offsets

    def outlooks(self, slots: IntArray) -> tuple[FloatArray, FloatArray]:
        """[slots] chance of a position that nobody has looked at yet: what stood of late, with everybody's rate where
        that is not much; and how far off that may well be."""
        self._sequences.cover(slots)
        num_tested = self._sequences.num_tested[slots] + PRIOR_TESTED
        outlooks = (self._sequences.num_accepted[slots] + PRIOR_TESTED * self.rate) / num_tested
        return outlooks, np.sqrt(outlooks * (1 - outlooks) / num_tested)

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step, and let what is known of those who did not draft fade."""
        self._sequences.cover(outcome.slots)
        num_tested = np.minimum(outcome.accepted + 1, outcome.drafted)
        self._fade(outcome.slots, np.maximum(num_tested, 1))
        total = int(num_tested.sum())
        if not total:
            return
        places, owners, stood = _tested(outcome, num_tested)
        looks = np.empty((total, 1 + NUM_LOOKS))
        looks[:, 0] = 1.0
        signals = outcome.draft_signals[places]
        looks[:, 1] = np.sqrt(signals[:, 0])
        looks[:, 2:] = signals[:, 1:]
        slots = outcome.slots[owners]
        own = self._own(slots)
        chances = 1 / (1 + np.exp(-(looks @ self.weights + own)))
        missing, doubts = stood - chances, chances * (1 - chances)
        self._learn_own(outcome.slots, owners, missing + doubts * own, doubts)
        self._learn_weights(looks, missing, doubts)
        kept = np.exp(-total / MEMORY)
        self._num_accepted = kept * self._num_accepted + float(outcome.accepted.sum())
        self._num_tested = kept * self._num_tested + total
        self._sequences.num_accepted[outcome.slots] += outcome.accepted
        self._sequences.num_tested[outcome.slots] += num_tested

    def forget(self, slots: IntArray) -> None:
        self._sequences.reset(slots)

    def _own(self, slots: IntArray) -> FloatArray:
        sequences = self._sequences
        own: FloatArray = sequences.pulls[slots] / (sequences.information[slots] + OFFSET_PRECISION)
        return own

    def _fade(self, slots: IntArray, num_tokens: IntArray) -> None:
        kept = np.exp(-num_tokens / SEQUENCE_MEMORY)
        for column in ("pulls", "information", "num_accepted", "num_tested"):
            getattr(self._sequences, column)[slots] *= kept

    def _learn_own(self, slots: IntArray, owners: IntArray, pulls: FloatArray, doubts: FloatArray) -> None:
        self._sequences.pulls[slots] += np.bincount(owners, pulls, slots.size)
        self._sequences.information[slots] += np.bincount(owners, doubts, slots.size)

    def _learn_weights(self, looks: FloatArray, missing: FloatArray, doubts: FloatArray) -> None:
        """One step of Newton's method, where the curvature is that of everything seen so far, fading."""
        kept = np.exp(-missing.size / MEMORY)
        prior = (1 - kept) * PRIOR_PRECISION * np.eye(1 + NUM_LOOKS)
        self._information = kept * self._information + prior + looks.T @ (looks * doubts[:, None])
        self.weights += np.linalg.solve(self._information, looks.T @ missing)


def _tested(outcome: Outcome, num_tested: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Of every tested token: its place among the drafted ones, the sequence, and whether it stood."""
    firsts = np.add.accumulate(outcome.drafted) - outcome.drafted
    owners = np.repeat(np.arange(outcome.slots.size), num_tested)
    depths = np.arange(owners.size) - np.repeat(np.add.accumulate(num_tested) - num_tested, num_tested)
    return firsts[owners] + depths, owners, (depths < outcome.accepted[owners]).astype(np.float64)
