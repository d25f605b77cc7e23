"""Which drafted tokens of a batch are worth verifying, under a budget: whole beginnings of drafts, wherever they are.

A position's score is the product of a signal along the draft up to and including it: how likely the draft is to stand
that far. The signal is one of the draft's distribution and never of the token drawn from it: dropping a token for what
it is would change the output's distribution, so the type does not allow it. For the same reason the budget is a number,
fixed before the step: scores further along a draft know the tokens before them, and a budget made from them would too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsde.core.stops import Signal

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class VerifyBudget:
    """What a batch may have verified, in one step, and who comes first."""

    signal: Signal
    """between 0 and 1: how likely a token is to stand"""
    num_tokens: int
    """drafted tokens that the sequences may have verified together"""
    needs: FloatArray | None = None
    """[sequences] tokens that each should gain in this step, the one that follows every draft included; the neediest is
    served first, and what is left goes to the likeliest tokens. None: all of it does"""
    most_for_need: int = 0
    """drafted tokens that one sequence may get for its need"""
    scores: FloatArray = field(default_factory=lambda: np.empty(0))
    """[drafted] of every position, kept or not, in no particular order; written by `select`, like the next"""
    num_cut: int = 0
    """drafted tokens that were not kept"""

    def select(self, confidences: FloatArray, lengths: IntArray, rows: IntArray) -> IntArray:
        """[all sequences] how much of each draft is kept. The budget is for `rows`; others keep what they have.

        `confidences` [all sequences, K] is the signal at every drafted position.
        """
        kept = lengths.copy()
        lengths = lengths[rows]
        is_drafted = np.arange(confidences.shape[1]) < lengths[:, None]
        scores = np.multiply.accumulate(confidences[rows], axis=1)
        self.scores = scores[is_drafted]
        if self.scores.size > self.num_tokens:
            firsts = self._needed(scores, lengths)
            kept[rows] = firsts + _likeliest(scores, firsts, lengths, self.num_tokens - int(firsts.sum()))
            self.num_cut = self.scores.size - self.num_tokens
        return kept

    def _needed(self, scores: FloatArray, lengths: IntArray) -> IntArray:
        """[sequences] drafted tokens that bring each to its need, as far as the budget goes."""
        if self.needs is None:
            return np.zeros_like(lengths)
        gained_before = np.ones_like(scores)
        gained_before[:, 1:] += np.add.accumulate(scores[:, :-1], axis=1)
        wanted = np.add.reduce(gained_before < self.needs[:, None], axis=1, dtype=np.int64)
        wanted = np.minimum(np.minimum(wanted, lengths), self.most_for_need)
        neediest = (-self.needs).argsort(kind="stable")
        ends = np.minimum(np.add.accumulate(wanted[neediest]), self.num_tokens)
        wanted[neediest] = np.diff(ends, prepend=0)
        return wanted


def _likeliest(scores: FloatArray, firsts: IntArray, lengths: IntArray, num_tokens: int) -> IntArray:
    """[sequences] how many of the `num_tokens` best positions between `firsts` and `lengths` are theirs."""
    if num_tokens == 0:
        return np.zeros_like(lengths)
    places = np.arange(scores.shape[1])
    is_open = (places >= firsts[:, None]) & (places < lengths[:, None])
    least = np.partition(scores[is_open], -num_tokens)[-num_tokens]
    counts: IntArray = np.add.reduce(is_open & (scores > least), axis=1, dtype=np.int64)
    # Of equal scores the earlier position: a later one is worth nothing without it.
    _, equals = np.nonzero((is_open & (scores == least)).T)
    counts += np.bincount(equals[: num_tokens - int(counts.sum())], minlength=len(lengths))
    return counts
