"""All lengths that can be chosen for a batch: of all tokens likelier than some level, those of so many passes.

A sequence's tokens become less likely along its draft, so those above a level are always whole beginnings. What a level
takes depends on the outlook alone. Outlooks are rounded to one of a few kinds, so that whatever can be chosen for a
whole batch is one product with tables made beforehand. Knows nothing of costs.
"""

from __future__ import annotations

import numpy as np

from dsde.policies.base import FloatArray, IntArray

LEVELS: FloatArray = np.geomspace(0.01, 0.99, 24)
NUM_KINDS = 64
LEAST_ODDS, MOST_ODDS = -5.5, 5.5
"""logarithms; a step between two kinds is a sixth"""


class Menu:
    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        kinds = 1 / (1 + np.exp(-np.linspace(LEAST_ODDS, MOST_ODDS, NUM_KINDS)))
        chances = kinds[:, None] ** np.arange(1, max_length + 1)
        taken = chances[:, None, :] >= LEVELS[:, None]
        self._lengths = np.add.reduce(taken, axis=2).T
        """[levels, kinds]"""
        counts = np.add.accumulate(taken, axis=2, dtype=np.int64)
        gains = np.add.accumulate(chances[:, None, :] * taken, axis=2)
        self._tables = np.stack((taken, counts, gains), axis=1).reshape(NUM_KINDS, -1)
        self._whole_gains = np.add.accumulate(chances, axis=1)

    def kinds(self, outlooks: FloatArray) -> IntArray:
        odds = np.log(outlooks / (1 - outlooks))
        steps = (odds - LEAST_ODDS) * ((NUM_KINDS - 1) / (MOST_ODDS - LEAST_ODDS)) + 0.5
        kinds: IntArray = np.minimum(np.maximum(steps, 0.0), NUM_KINDS - 1).astype(np.int64)
        return kinds

    def totals(self, kinds: IntArray) -> FloatArray:
        """[3, levels, passes] for sequences of these kinds: how many are in a pass, how many tokens were drafted up to
        and including it, and how many of these may be expected to stand."""
        members = np.bincount(kinds, minlength=NUM_KINDS)
        present = np.flatnonzero(members)
        totals: FloatArray = members[present] @ self._tables[present]
        return totals.reshape(3, LEVELS.size, self.max_length)

    def totals_of_one_length(self, kinds: IntArray) -> FloatArray:
        """[3, 1, passes] the same, if all are in every pass."""
        passes = np.arange(1, self.max_length + 1)
        gains = np.add.reduce(self._whole_gains[kinds], axis=0)
        return np.stack((np.full(self.max_length, kinds.size), kinds.size * passes, gains))[:, None, :]

    def lengths(self, kinds: IntArray, level: int, num_passes: int) -> IntArray:
        lengths: IntArray = np.minimum(self._lengths[level, kinds], num_passes)
        return lengths
