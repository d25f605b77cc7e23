"""Measures the signals that draft stops look at, on the draft's raw logits. Knows no rule."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.stops import SIGNALS, Signal

FloatArray = NDArray[np.float64]

SURE = (0.0, 1.0, 1.0)
"""all signals of a token that was chosen rather than drawn from a distribution"""


def measure(logits: torch.Tensor, signal: Signal) -> FloatArray:
    """[rows] of one signal."""
    return _values(torch.log_softmax(logits, -1), signal)


def measure_all(logits: torch.Tensor) -> FloatArray:
    """[rows, 3] of all of them, in the order of SIGNALS."""
    log_probs = torch.log_softmax(logits, -1)
    return np.stack([_values(log_probs, signal) for signal in SIGNALS], axis=1)


def token_probs(logits: torch.Tensor, tokens: torch.Tensor) -> FloatArray:
    """[rows] probability of one token each."""
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen.exp().double().cpu().numpy()


def _values(log_probs: torch.Tensor, signal: Signal) -> FloatArray:
    if signal is Signal.ENTROPY:
        # 0 * log 0 is 0, also where a trimmed vocabulary gives a token no chance at all.
        values = -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1)
    else:
        top = log_probs.topk(2, dim=-1).values.exp()
        values = top[:, 0] if signal is Signal.TOP_PROB else top[:, 0] - top[:, 1]
    return values.double().cpu().numpy()
