"""What every decoder-only model is: an embedding, layers, a final norm and a head.

Knows how a packed batch goes through the layers and which rows get logits. What a layer computes is the family's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from dsde.models.batch import KVCache, PackedBatch
from dsde.models.config import ModelConfig
from dsde.models.layers import RMSNorm, Rotary, Rotation
from dsde.models.linear import Linear


class Layer(Protocol):
    """One decoder layer; `cache_k` and `cache_v` are its own part of the KV cache."""

    is_local: bool
    """rotated by the local rotary embedding, where the model has one"""

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        batch: PackedBatch,
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class Decoder:
    """A loaded model. Stateless: everything that changes lives in the batch and the cache."""

    config: ModelConfig
    embedding: torch.Tensor
    embedding_scale: float
    rotary: Rotary
    local_rotary: Rotary | None
    layers: Sequence[Layer]
    norm: RMSNorm
    head: Linear
    head_tokens: torch.Tensor | None = None
    """tokens that the rows of the head stand for, where a draft's vocabulary is trimmed; None: all, in order"""

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def new_cache(self, num_blocks: int) -> KVCache:
        config = self.config
        return KVCache.allocate(
            config.num_layers, num_blocks, config.num_kv_heads, config.head_dim, self.dtype, self.device
        )

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Write the KV of every token of the batch; return float32 logits of the rows asked for."""
        hidden = F.embedding(batch.tokens, self.embedding)
        if self.embedding_scale != 1.0:
            # The factor is rounded to the model's dtype, as in training.
            hidden = hidden * torch.tensor(self.embedding_scale, dtype=self.dtype).item()
        rotation = self.rotary(batch.positions)
        local_rotation = rotation if self.local_rotary is None else self.local_rotary(batch.positions)
        for layer, cache_k, cache_v in zip(self.layers, cache.keys, cache.values, strict=True):
            hidden = layer(hidden, local_rotation if layer.is_local else rotation, cache_k, cache_v, batch)
        return self._logits(hidden, batch.logit_rows)

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        if rows is not None:
            if rows.numel() == 0:
                return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
            hidden = hidden.index_select(0, rows)
        logits = self.head(self.norm(hidden)).float()
        if self.config.final_softcap is not None:
            logits = torch.tanh(logits / self.config.final_softcap) * self.config.final_softcap
        if self.head_tokens is None:
            return logits
        full = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return full.index_copy_(1, self.head_tokens, logits)
