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
        log_probs = torch.log_softmax(logits[rows].float(), dim=-1)
        probs = log_probs.exp()
        entropy = -torch.where(probs > 0, probs * log_probs, 0.0).sum(dim=-1)
        top = probs.topk(2, dim=-1).values
        drawn = probs.gather(1, token_ids[rows].long().unsqueeze(1)).squeeze(1)
        parts.append(torch.stack((entropy, top[:, 0], top[:, 0] - top[:, 1], drawn), dim=1))
    return torch.cat(parts) if parts else logits.new_zeros((0, 4), dtype=torch.float32)
