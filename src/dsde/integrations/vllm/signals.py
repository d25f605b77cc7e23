"""What policies look at, from logits on the device: the KLD of target and draft, and how sure the draft was."""

from __future__ import annotations

import math

import torch

LOG_FLOOR = math.log(1e-8)
"""what probabilities are clamped at, as everywhere in dsde"""
ROWS_AT_ONCE = 64
"""so that float32 copies of logits stay small beside the KV cache"""


def divergences(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """[rows] KL(target || draft) of raw logits [rows, vocabulary], in nats."""
    parts = []
    for first in range(0, target.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        log_p = torch.log_softmax(target[rows].float(), dim=-1)
        log_q = torch.log_softmax(draft[rows].float(), dim=-1).clamp_(min=LOG_FLOOR)
        parts.append(torch.linalg.vecdot(log_p.exp(), log_p.clamp(min=LOG_FLOOR).sub_(log_q)).clamp_(min=0.0))
    return torch.cat(parts) if parts else target.new_zeros(0, dtype=torch.float32)


def looks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """[rows, 4] entropy, top probability and margin of the draft's distribution, and the drawn token's probability."""
    parts = []
    for first in range(0, logits.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        probs = torch.softmax(logits[rows], dim=-1, dtype=torch.float32)
        entropy = torch.special.entr(probs).sum(dim=-1)
        drawn = probs.gather(1, token_ids[rows].long().unsqueeze(1)).squeeze(1)
        top = probs.max(dim=-1, keepdim=True)
        # The second is the first of what is left: over a vocabulary much faster than sorting two out.
        second = probs.scatter_(1, top.indices, 0.0).amax(dim=-1)
        likeliest = top.values.squeeze(1)
        parts.append(torch.stack((entropy, likeliest, likeliest - second, drawn), dim=1))
    return torch.cat(parts) if parts else logits.new_zeros((0, 4), dtype=torch.float32)
