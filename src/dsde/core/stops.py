"""Rules that end a draft while it is being made, as data: which signal, which threshold, and when it is looked at.

A rule that is looked at before a token is drawn may cancel it, and so may know the draft's distribution but not the
token; a rule that is looked at afterwards may know both, but keeps the token. Cancelling a token for what it is would
change the output's distribution, so the types do not allow it. Knows nothing of how signals are measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Signal(Enum):
    """Of the draft's distribution at a position, raw: before temperature and truncation."""

    ENTROPY = "entropy"
    """in nats"""
    TOP_PROB = "top_prob"
    MARGIN = "margin"
    """between the likeliest token and the next"""


SIGNALS = tuple(Signal)
"""the order in which they are kept wherever there are all of them"""


LEAST_TOP_PROB, MOST_TOP_PROB = 0.05, 0.999
"""beyond which a draft is as unsure, or as sure, as can be told apart"""
SMALLEST_PROB = 1e-30
"""of a token, where its logarithm is taken"""


def make_looks(signals: FloatArray) -> FloatArray:
    """[positions, 3] of signals [positions, 3]: what log-odds to be accepted are about linear in. The root of the
    entropy, the draft's own log-odds of its likeliest token, and the margin."""
    looks = np.empty_like(signals)
    sure = np.minimum(np.maximum(signals[:, 1], LEAST_TOP_PROB), MOST_TOP_PROB)
    looks[:, 0] = np.sqrt(signals[:, 0])
    looks[:, 1] = np.log(sure / (1 - sure))
    looks[:, 2] = signals[:, 2]
    return looks


class TokenSignal(Enum):
    """Of the token that was drawn, under the same distribution."""

    TOKEN_PROB = "token_prob"
    TOTAL_LOG_PROB = "total_log_prob"
    """log-probability of the whole draft so far"""


@dataclass(slots=True)
class StopBefore:
    """Do not draw a token where the signal is beyond the threshold."""

    signal: Signal
    thresholds: FloatArray
    """[sequences] infinite: never"""
    stops_above: bool
    """beyond means above; otherwise below"""
    first_depth: int = 0
    """tokens that are drawn in any case"""


@dataclass(slots=True)
class StopAfter:
    """Keep a token where the signal is beyond the threshold, and draw no more."""

    signal: Signal | TokenSignal
    thresholds: FloatArray
    stops_above: bool


@dataclass(slots=True)
class StopByWorth:
    """Stop where the next token would not earn what it costs.

    A token is worth the chance that the whole draft stands up to and including it: the product, along the draft, of
    each position's chance to be accepted, whose log-odds are `offsets` plus `weights` times what `make_looks` makes of
    its signals. These are of the draft's distribution, so a token that is not drawn for what it is worth was never
    looked at.
    """

    weights: FloatArray
    """[3]"""
    offsets: FloatArray
    """[sequences] infinite: never stopped, and worth any pass"""
    outlooks: FloatArray
    """[sequences] chance to be accepted of a position that has not been looked at yet"""
    keep_above: float
    """what it costs, in tokens, to verify one more"""
    go_on_above: float
    """what it costs to draft and verify one more, for a sequence in a pass that is made anyway"""
    pass_above: float
    """what a pass costs, whoever takes part: it is made if those who would go on are together worth so much more than
    their own costs"""
    usual: IntArray | None = None
    """[sequences] tokens that they draft at these prices if nothing is looked at"""
    dearer: float = 0.0
    """how much more verifying one costs beyond the longest of these"""

    def costs(self, depth: int) -> tuple[float, float, float]:
        """Of verifying the token `depth` tokens into its draft, of going on behind it, and of the pass for that."""
        longest = sys.maxsize if self.usual is None else int(self.usual.max())
        keep_above = self.keep_above + (self.dearer if depth >= longest else 0.0)
        return keep_above, self.go_on_above + (self.dearer if depth + 1 >= longest else 0.0), self.pass_above

    def survivals(self, rows: IntArray, before: FloatArray, signals: FloatArray) -> FloatArray:
        """[rows] chance that a draft stands up to and including a position with these `signals` [rows, 3], given that
        up to the one `before` it."""
        looks = make_looks(signals) @ self.weights
        chances: FloatArray = np.exp(-np.logaddexp(0.0, -(self.offsets[rows] + looks)))
        return before * chances

    def keeps(self, depth: int, rows: IntArray, survivals: FloatArray) -> BoolArray:
        """[rows] whether the position is worth verifying."""
        keep_above, _, _ = self.costs(depth)
        kept: BoolArray = (survivals >= keep_above) | np.isposinf(self.offsets[rows])
        return kept

    def goes_on(self, depth: int, rows: IntArray, survivals: FloatArray, may_go_on: BoolArray) -> BoolArray:
        """[rows] whether drafts that were kept so far draw another token."""
        _, go_on_above, pass_above = self.costs(depth)
        is_fixed = np.isposinf(self.offsets[rows])
        worths = survivals * self.outlooks[rows]
        would: BoolArray = may_go_on & ((worths >= go_on_above) | is_fixed)
        is_made = (would & is_fixed).any() or (worths[would] - go_on_above).sum() >= pass_above
        return would if is_made else np.zeros_like(would)


Stop = StopBefore | StopAfter | StopByWorth


def is_beyond(stop: StopBefore | StopAfter, rows: IntArray, values: FloatArray) -> BoolArray:
    """Whether the rule ends the drafts of these sequences, whose signal has these values."""
    thresholds = stop.thresholds[rows]
    beyond: BoolArray = values > thresholds if stop.stops_above else values < thresholds
    return beyond
