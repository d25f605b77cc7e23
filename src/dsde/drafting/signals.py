"""Measures the signals that draft stops look at, on the draft's raw logits. Knows no rule."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.stops import Signal
from dsde.sampling.distribution import argmax

FloatArray = NDArray[np.float64]

SURE = (0.0, 1.0, 1.0)
"""all signals of a token that was chosen rather than drawn from a distribution"""


def measure(logits: torch.Tensor, signal: Signal) -> FloatArray:
    """[rows] of one signal."""
    return _values(torch.log_softmax(logits, -1), signal)


def measure_all(logits: torch.Tensor, tokens: torch.Tensor | None = None) -> FloatArray:
    """[rows, 3] of all of them, in the order of `core.stops.SIGNALS`. `tokens`: all that may have a chance."""
    # For every draft pass on a CPU, where a pass is a few milliseconds: as few walks over the vocabulary as possible.
    if tokens is not None:
        logits = logits.index_select(-1, tokens)
    probs = torch.softmax(logits, -1)
    top_probs, places = probs.amax(-1), argmax(logits).unsqueeze(-1)
    # Log-probabilities but for a constant; finite also where a trimmed vocabulary gives a token no chance at all.
    shifted = (logits - logits.gather(-1, places)).clamp_(min=-1e4)
    entropies = (-torch.linalg.vecdot(probs, shifted) - top_probs.log()).clamp_(min=0.0)
    margins = top_probs - probs.scatter_(-1, places, 0.0).amax(-1)
    return torch.stack((entropies, top_probs, margins), dim=1).double().cpu().numpy()


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
