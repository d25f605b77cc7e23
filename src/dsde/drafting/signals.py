"""Measures the signals that draft stops look at, on the draft's raw logits. Knows no rule."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.stops import Signal


def measure(logits: torch.Tensor, signal: Signal) -> NDArray[np.float64]:
    """[rows] of one signal."""
    log_probs = torch.log_softmax(logits, -1)
    if signal is Signal.ENTROPY:
        # 0 * log 0 is 0, also where a trimmed vocabulary gives a token no chance at all.
        values = -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1)
    else:
        top = log_probs.topk(2, dim=-1).values.exp()
        values = top[:, 0] if signal is Signal.TOP_PROB else top[:, 0] - top[:, 1]
    return values.double().cpu().numpy()


def token_probs(logits: torch.Tensor, tokens: torch.Tensor) -> NDArray[np.float64]:
    """[rows] probability of one token each."""
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen.exp().double().cpu().numpy()
