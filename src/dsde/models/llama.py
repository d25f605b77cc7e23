"""The Llama family's layer: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3, SmolLM2, TinyLlama.

They differ only in biases, norms of queries and keys, windows and rotary scaling, all of which are data here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsde.models.batch import PackedBatch
from dsde.models.layers import GatedMLP, Rotary, SelfAttention
from dsde.models.norm import RMSNorm


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
        rotary: Rotary,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        batch: PackedBatch,
    ) -> torch.Tensor:
        attended = self.attention(hidden, self.attention_norm, rotary, cache_k, cache_v, batch)
        hidden = self.attention.output(attended, residual=hidden)
        return self.mlp(hidden, self.mlp_norm, residual=hidden)
