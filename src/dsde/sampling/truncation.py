"""min_p, top_k and top_p on rows of probabilities.

All three keep or drop by value, never by rank among equals, so a row's result cannot depend on how a sort broke a tie
or on which other rows were in the call. Knows nothing of requests.
"""

from __future__ import annotations

import torch

_NUCLEUS_FIRST_TRY = 256


def truncate(probs: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Drop unlikely tokens and normalise again. One setting per row; 0, 0 (or less) and 1 keep everything."""
    if bool((min_p > 0).any()):
        floor = min_p * probs.amax(-1)
        probs = _drop_below(probs, floor)
    if bool((top_k > 0).any()):
        probs = _drop_below(probs, _kth_largest(probs, top_k))
    if bool((top_p < 1).any()):
        probs = _drop_below(probs, _nucleus_edge(probs, top_p))
    return probs


def _drop_below(probs: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    kept = torch.where(probs >= floor.unsqueeze(-1), probs, 0.0)
    # A row whose floor dropped nothing keeps its exact values: rows must not change because a neighbour is truncated.
    changed = (kept != probs).any(-1, keepdim=True)
    return torch.where(changed, kept / kept.sum(-1, keepdim=True), probs)


def _kth_largest(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The k-th largest value of each row; 0 where all tokens are kept."""
    vocab = probs.shape[-1]
    limited = (top_k > 0) & (top_k < vocab)
    if not bool(limited.any()):
        return torch.zeros_like(probs[:, 0])
    k = torch.where(limited, top_k, 1)
    largest = probs.topk(int(k.max()), dim=-1).values
    return torch.where(limited, largest.gather(-1, (k - 1).unsqueeze(-1)).squeeze(-1), 0.0)


def _nucleus_edge(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest probability inside the nucleus; 0 where all tokens are kept."""
    edge = torch.zeros_like(probs[:, 0])
    rows = torch.nonzero(top_p < 1).squeeze(-1)
    size = min(_NUCLEUS_FIRST_TRY, probs.shape[-1])
    while len(rows):
        # Sorting a whole vocabulary is the dearest step of sampling, and the nucleus is nearly always small.
        largest = probs[rows].topk(size, dim=-1).values
        mass = largest.cumsum(-1, dtype=torch.float64)
        inside = (mass < top_p[rows].unsqueeze(-1)).sum(-1)
        found = (inside < size) if size < probs.shape[-1] else torch.ones_like(inside, dtype=torch.bool)
        index = inside.clamp(max=size - 1)
        edge[rows[found]] = largest.gather(-1, index.unsqueeze(-1)).squeeze(-1)[found]
        rows, size = rows[~found], probs.shape[-1]
    return edge
