"""The confidence threshold of Hugging Face's assisted generation (arXiv 2405.04304): stop behind an unlikely token.

Knows the probability that the draft gave the token it drew, which is kept. The threshold is learnt from what became of
tokens with such probabilities, for all requests together: the one with the least false alarms plus three times the
misses, among accepted tokens and the first rejected one of every draft.
"""

from __future__ import annotations

import numpy as np

from dsde.core.stops import Stop, StopAfter, TokenSignal
from dsde.policies.base import BatchView, FloatArray, Need, Outcome
from dsde.policies.limits import check_real
from dsde.policies.stopping import StoppingPolicy

_MISS_COST = 3.0
_FEWEST = 6
"""judged tokens before the threshold is learnt"""
_HISTORY = 512
"""judged tokens that are remembered, the latest"""


class Confidence(StoppingPolicy):
    needs = Need.TOKEN_PROB

    def __init__(self, threshold: float = 0.4, max: int = 20) -> None:
        super().__init__(max)
        check_real("threshold", threshold, 0.0, 1.0)
        self.threshold = threshold
        self._probs = np.empty(0)
        self._stood = np.empty(0, dtype=bool)

    def signals(self, batch: BatchView) -> dict[str, FloatArray]:
        return {"threshold": np.full(batch.slots.size, self.threshold)}

    def rule(self, batch: BatchView) -> Stop:
        return StopAfter(TokenSignal.TOKEN_PROB, np.full(batch.slots.size, self.threshold), stops_above=False)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        starts = np.cumsum(outcome.drafted) - outcome.drafted
        depths = np.arange(outcome.drafted.sum()) - np.repeat(starts, outcome.drafted)
        accepted = np.repeat(outcome.accepted, outcome.drafted)
        # What was drafted behind a rejected token was never compared.
        judged = depths <= accepted
        self._probs = np.concatenate([self._probs, outcome.token_probs[judged]])[-_HISTORY:]
        self._stood = np.concatenate([self._stood, (depths < accepted)[judged]])[-_HISTORY:]
        if len(self._stood) >= _FEWEST and self._stood.any() and not self._stood.all():
            self.threshold = best_threshold(self._probs, self._stood)


def best_threshold(probs: FloatArray, stood: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    """Among the probabilities seen, the one that costs least if tokens from it on are taken for good."""
    order = np.argsort(-probs, kind="stable")
    ranked, good = probs[order], stood[order]
    # The last of equal probabilities: all of them are on the same side of a threshold.
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    false_alarms = np.cumsum(~good)[ends] / max((~good).sum(), 1)
    misses = 1 - np.cumsum(good)[ends] / max(good.sum(), 1)
    return float(ranked[ends][np.argmin(false_alarms + _MISS_COST * misses)])
