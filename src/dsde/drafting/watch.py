"""Looks at the drafts of one step while they are made: what is wanted of them, and where a rule ends them.

The host's way, one depth after another. Knows nothing of models or tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.stops import (
    SIGNALS,
    SMALLEST_PROB,
    Signal,
    Stop,
    StopAfter,
    StopBefore,
    StopByWorth,
    TokenSignal,
    is_beyond,
)
from dsde.drafting.signals import SURE, measure, measure_all, token_probs

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Watch:
    def __init__(
        self,
        stop: Stop | None,
        num_sequences: int,
        longest: int,
        want_token_probs: bool,
        want_signals: bool,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """`tokens`: those that the draft may propose, where it is not all of them."""
        self.stop = stop
        self._tokens = tokens
        self.signals = np.tile(SURE, (num_sequences, longest, 1))
        """[sequences, depths, 3] measured as far as wanted"""
        self.token_probs = np.ones((num_sequences, longest))
        """[sequences, depths] likewise"""
        self._survivals = np.ones(num_sequences)
        self._wants_signals = want_signals or isinstance(stop, StopByWorth)
        looks_at_tokens = isinstance(stop, StopAfter) and isinstance(stop.signal, TokenSignal)
        self._wants_token_probs = want_token_probs or looks_at_tokens

    def keeps(self, depth: int, rows: IntArray, logits: torch.Tensor) -> BoolArray:
        """[rows] whether these sequences, whose next token would come from `logits`, draw it."""
        if self._wants_signals:
            self.signals[rows, depth] = measure_all(logits, self._tokens)
        if isinstance(self.stop, StopBefore) and depth >= self.stop.first_depth:
            return ~is_beyond(self.stop, rows, self._values(self.stop.signal, depth, rows, logits))
        if isinstance(self.stop, StopByWorth):
            self._survivals[rows] = self.stop.survivals(rows, self._survivals[rows], self.signals[rows, depth])
            return self.stop.keeps(depth, rows, self._survivals[rows])
        return np.ones(len(rows), dtype=bool)

    def goes_on(
        self, depth: int, rows: IntArray, logits: torch.Tensor, drawn: torch.Tensor, may_go_on: BoolArray
    ) -> BoolArray:
        """[rows] whether these sequences, which drew these tokens, draft on."""
        if self._wants_token_probs:
            self.token_probs[rows, depth] = token_probs(logits, drawn)
        if isinstance(self.stop, StopAfter):
            return may_go_on & ~is_beyond(self.stop, rows, self._values(self.stop.signal, depth, rows, logits))
        if isinstance(self.stop, StopByWorth):
            return self.stop.goes_on(depth, rows, self._survivals[rows], may_go_on)
        return may_go_on

    def _values(self, signal: Signal | TokenSignal, depth: int, rows: IntArray, logits: torch.Tensor) -> FloatArray:
        if isinstance(signal, Signal):
            column: FloatArray = self.signals[rows, depth, SIGNALS.index(signal)]
            return column if self._wants_signals else measure(logits, signal)
        probs: FloatArray = self.token_probs[rows, : depth + 1]
        if signal is TokenSignal.TOKEN_PROB:
            return probs[:, -1]
        total: FloatArray = np.log(np.maximum(probs, SMALLEST_PROB)).sum(-1)
        return total
