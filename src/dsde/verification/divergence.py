"""How far the draft was from the target: the KLD of every verified position (arXiv 2509.01083).

Measured on the softmax of raw logits, before temperature and everything else: at temperature 0 the sampling
distributions are one-hot, and a KLD of one-hots says nothing. Target first, probabilities clamped at 1e-8.
"""

from __future__ import annotations

import math

import torch

LOG_FLOOR = math.log(1e-8)
_ROWS_AT_ONCE = 8
"""Few enough that intermediate rows stay in a CPU's cache."""


def kl_divergence(target_logits: torch.Tensor, rows: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """[rows] KL(target || draft) in nats, never negative; `rows` names the target row of each draft row."""
    step = _ROWS_AT_ONCE if target_logits.device.type == "cpu" else len(rows) or 1
    parts = [_kl_rows(target_logits[rows[i : i + step]], draft_logits[i : i + step]) for i in range(0, len(rows), step)]
    return torch.cat(parts) if parts else target_logits.new_zeros(0)


def _kl_rows(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    p = torch.softmax(target_logits, -1)
    log_q = torch.log_softmax(draft_logits, -1).clamp_(min=LOG_FLOOR)
    difference = torch.log_softmax(target_logits, -1).clamp_(min=LOG_FLOOR).sub_(log_q)
    divergence: torch.Tensor = torch.linalg.vecdot(p, difference)
    return divergence.clamp_(min=0.0)


def point_mass_divergence(target_logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[rows] the same for a draft that is sure of its token: 1 there, the clamp's 1e-8 everywhere else."""
    log_p = torch.log_softmax(target_logits, -1)
    p = log_p.exp()
    negative_entropy: torch.Tensor = torch.linalg.vecdot(p, log_p.clamp(min=LOG_FLOOR))
    elsewhere = 1.0 - p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (negative_entropy - elsewhere * LOG_FLOOR).clamp_(min=0.0)
