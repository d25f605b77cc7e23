"""The Llama family's layer: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3, SmolLM2, TinyLlama.

They differ only in biases, norms of queries and keys, windows and rotary scaling, all of which are data here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsde.models.batch import PackedBatch
from dsde.models.layers import GatedMLP, RMSNorm, Rotation, SelfAttention


@dataclass(slots=True)
class LlamaLayer:
    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP
    is_local: bool

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        batch: PackedBatch,
    ) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, cache_k, cache_v, batch)
        return hidden.add_(self.mlp(self.mlp_norm(hidden)))
