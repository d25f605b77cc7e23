"""The layer of Gemma 2 and 3: a norm before and after each half, a GELU gate, windows and softcaps.

That a Gemma norm multiplies by 1 + weight is settled when weights are loaded, not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsde.models.batch import PackedBatch
from dsde.models.layers import GatedMLP, Rotary, SelfAttention
from dsde.models.norm import RMSNorm


@dataclass(slots=True)
class GemmaLayer:
    attention_norm: RMSNorm
    attention: SelfAttention
    post_attention_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    post_mlp_norm: RMSNorm
    is_local: bool

    def __call__(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        batch: PackedBatch,
    ) -> torch.Tensor:
        attended = self.attention(hidden, self.attention_norm, rotary, cache_k, cache_v, batch)
        hidden = hidden + self.post_attention_norm(self.attention.output(attended))
        return hidden.add_(self.post_mlp_norm(self.mlp(hidden, self.mlp_norm)))
