"""Which drafted tokens of a batch are worth verifying, under a budget: the most probable ones, wherever they are.

A position's score is the product of a signal along the draft up to and including it. The signal is one of the draft's
distribution and never of the token drawn from it: dropping a token for what it is would change the output's
distribution, so the type does not allow it. Scores fall along a draft, so what is kept is always its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsde.core.stops import Signal

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VerifyBudget:
    signal: Signal
    """between 0 and 1: how likely a token is to stand"""
    num_tokens: int
    """drafted tokens that the whole batch may have verified"""


def select(confidences: NDArray[np.float64], lengths: IntArray, num_tokens: int) -> IntArray:
    """[sequences] how much of each draft is kept. `confidences` [sequences, K] of every drafted position."""
    if int(lengths.sum()) <= num_tokens:
        return lengths
    sequences, depths = np.nonzero(np.arange(confidences.shape[1]) < lengths[:, None])
    scores = np.cumprod(confidences, axis=1)[sequences, depths]
    # Of equal scores the earlier position: a later one is worth nothing without it.
    kept = np.lexsort((sequences, depths, -scores))[:num_tokens]
    counts: IntArray = np.bincount(sequences[kept], minlength=len(lengths)).astype(np.int64)
    return counts
