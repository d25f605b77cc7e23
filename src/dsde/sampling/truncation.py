"""min_p, top_k and top_p on rows of probabilities.

All three keep or drop by value, never by rank among equals, so a row's result cannot depend on how a sort broke a tie
or on which other rows were in the call. Knows nothing of requests.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_FIRST_FLOOR = 1e-4
"""Few tokens are likelier than this, and nearly always they are enough to find the edge among."""
_SUM_ERROR = 1e-4
"""More than float32 can lose when it adds up a vocabulary."""


def truncate(probs: torch.Tensor, min_p: list[float], top_k: list[int], top_p: list[float]) -> None:
    """Drop unlikely tokens in place and normalise again. One setting per row; 0, 0 (or less) and 1 keep everything."""
    vocab = probs.shape[-1]
    for row, share, count, mass in zip(probs, min_p, top_k, top_p, strict=True):
        count = count if 0 < count < vocab else vocab
        if share > 0 or count < vocab or mass < 1:
            row.masked_fill_(row < _edge(row.cpu().numpy(), share, count, mass), 0.0)
            row /= row.sum()


def _edge(row: NDArray[np.float32], min_p: float, top_k: int, top_p: float) -> float:
    """The smallest probability that is kept."""
    head, whole = _likeliest(row, min_p, top_k, top_p)
    if top_p == 1:
        return float(head[-1])
    inside = int(np.searchsorted(np.cumsum(head, dtype=np.float64), top_p * whole))
    return float(head[min(inside, len(head) - 1)])


def _likeliest(row: NDArray[np.float32], min_p: float, top_k: int, top_p: float) -> tuple[NDArray[np.float32], float]:
    """What min_p and top_k leave, in descending order, and its mass; without them as much as top_p can need, and 1.

    Sorting a vocabulary is the dearest step of sampling, so only tokens above a floor are looked at, and the floor is
    lowered until they are enough.
    """
    floor = _FIRST_FLOOR
    while True:
        head = np.sort(row[row > floor])[::-1]
        everything = floor < 0
        if min_p == 0 and top_k == len(row):
            if everything or head.sum() > top_p + _SUM_ERROR:
                return head, 1.0
        elif everything or (len(head) and (top_k <= len(head) or min_p * head[0] > floor)):
            edge = max(min_p * head[0], head[min(top_k, len(head)) - 1])
            kept = head[head >= edge]
            return kept, float(kept.sum(dtype=np.float64))
        floor = floor * 0.1 if floor > 1e-9 else -1.0
