"""A stop rule as the device reads it: numbers in the sheet of a pass, and what its decisions mean.

`kernels.decide` applies it; `Watch` is the same on the host. Knows nothing of passes.
"""

from __future__ import annotations

import itertools
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dsde.core.stops import SIGNALS, Stop, StopBefore, StopByWorth, TokenSignal

Arrays = dict[str, NDArray[np.int32]]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

LOOKS = (*SIGNALS, *TokenSignal)
"""what a rule may look at, in the device's order"""


class Kind(IntEnum):
    BEFORE = 0
    AFTER = 1
    WORTH = 2


class Decision(IntEnum):
    """on a token that was drawn"""

    DROPPED = 0
    KEPT = 1
    GOES_ON = 2
    """kept, and another one is to be drawn"""


class Ruling:
    def __init__(self, stop: Stop) -> None:
        self.first_depth = stop.first_depth if isinstance(stop, StopBefore) else 0
        """the first that is looked at"""
        self._costs = stop.costs if isinstance(stop, StopByWorth) else None
        weights, sign, look = np.zeros(3), 1.0, 0
        outlooks = bounds = np.empty(0)
        if isinstance(stop, StopByWorth):
            self.kind, self.may_drop = Kind.WORTH, stop.keep_above + stop.dearer > 0
            weights, bounds, outlooks = stop.weights, stop.offsets, stop.outlooks
        else:
            self.may_drop = isinstance(stop, StopBefore)
            self.kind = Kind.BEFORE if self.may_drop else Kind.AFTER
            bounds, look = stop.thresholds, LOOKS.index(stop.signal)
            sign = 1.0 if stop.stops_above else -1.0
            outlooks = np.ones(len(bounds))
        self.usual = stop.usual if isinstance(stop, StopByWorth) else None
        """[sequences] how long their drafts are expected to be"""
        self.keeps_last = self.kind is not Kind.BEFORE
        """whether a draft that it ends mostly keeps the token that it was ended for"""
        self.look = look
        with np.errstate(over="ignore"):  # beyond single precision is as good as infinite
            self.bounds = bounds.astype(np.float32)
            self.outlooks = outlooks.astype(np.float32)
            self.numbers = np.array([*weights, 0.0, 0.0, 0.0, sign], dtype=np.float32)

    def decides(self, depth: int, is_last: bool) -> bool:
        """Whether there is anything to decide on tokens so far into their drafts, or on the last that may be drawn."""
        return depth >= self.first_depth and (self.may_drop or not is_last)

    def num_expected(self, sequences: IntArray, num_drafted: int) -> int:
        """How many of these, who have drafted so much, are expected to draft more."""
        if self.usual is None:
            return len(sequences)
        # Whoever is never stopped goes on for certain.
        expected = (self.usual[sequences] > num_drafted) | np.isposinf(self.bounds[sequences])
        return int(np.count_nonzero(expected))

    def costs(self, num_depths: int) -> NDArray[np.float32]:
        """[depths, 3] what a rule by worth, that says what is usual, asks of a token so far into its draft."""
        assert self._costs is not None
        assert self.usual is not None
        longest = int(self.usual.max())
        # Up to there, behind it, and between the two: a call for each, and not for every depth.
        ends = sorted({0, *(min(max(depth, 0), num_depths) for depth in (longest - 1, longest)), num_depths})
        costs = np.empty((num_depths, 3), dtype=np.float32)
        with np.errstate(over="ignore"):
            for start, end in itertools.pairwise(ends):
                costs[start:end] = self._costs(start)
        return costs

    def write(
        self, host: Arrays, sequences: IntArray, places: IntArray, may_go_on: BoolArray, depth: int, number: int
    ) -> None:
        """For tokens of these sequences that lie at `places` in the store, `depth` tokens into their drafts."""
        count = len(sequences)
        host["places"][:count] = places
        host["places"][count:] = -1
        host["standings"][:count] = sequences
        host["may_go_on"][:count] = may_go_on
        host["bounds"][:count] = self.bounds[sequences]
        host["outlooks"][:count] = self.outlooks[sequences]
        host["rule"][:] = self.kind, self.look, depth == self.first_depth, number
        host["rule_numbers"][:] = self.numbers
        if self._costs is not None:
            with np.errstate(over="ignore"):
                host["rule_numbers"][3:6] = self._costs(depth)


def ruling_sizes(count: int) -> dict[str, int]:
    """How much room `Ruling.write` needs for so many tokens."""
    sizes = dict.fromkeys(("places", "standings", "may_go_on", "bounds", "outlooks"), count)
    return {**sizes, "rule": 4, "rule_numbers": 7}


RULING_FIELDS = tuple(ruling_sizes(0))
"""arrays that hold a ruling"""
FIRST = "first_"
"""before their names, where a pass has a second one: that on the first tokens, which it begins with"""
