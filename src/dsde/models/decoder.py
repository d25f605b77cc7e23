"""What every decoder-only model is: an embedding, layers, a final norm and a head.

Knows how a packed batch goes through the layers and which rows get logits. What a layer computes is the family's own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from dsde.device import backend
from dsde.models.batch import Heads, KVCache, PackedBatch
from dsde.models.config import ModelConfig
from dsde.models.layers import Rotary
from dsde.models.linear import Linear
from dsde.models.norm import RMSNorm

_NUM_FIRST_LAYERS = 2
"""that a pass in parts begins with: they take about as long as the host needs to start more, or to hear whether more is
wanted, some 50 us"""


class Layer(Protocol):
    """One decoder layer; `cache_k` and `cache_v` are its own part of the KV cache."""

    is_local: bool
    """rotated by the local rotary embedding, where the model has one"""

    def __call__(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
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

    @property
    def heads(self) -> Heads:
        config = self.config
        return Heads(config.num_heads // config.num_kv_heads, config.num_kv_heads, config.head_dim, self.dtype)

    def new_cache(self, num_blocks: int) -> KVCache:
        config = self.config
        return KVCache.allocate(
            config.num_layers, num_blocks, config.num_kv_heads, config.head_dim, self.dtype, self.device
        )

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Write the KV of every token of the batch; return float32 logits of the rows asked for."""
        if batch.work is None and backend.has_kernels(self.device):
            batch.work = self.heads.attention_work(batch)
        hidden = self.read(batch, cache)
        if batch.logit_rows is not None and batch.logit_rows.numel() == 0:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self.logits(hidden, batch.logit_rows).float()

    def read(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Write the KV of every token of the batch; return what the last layer made of them."""
        return self.read_on(self.embed(batch), batch, cache, range(len(self.layers)))

    def read_in_parts(self, batch: PackedBatch, cache: KVCache) -> Generator[None, None, torch.Tensor]:
        """`read`, for whoever queues it piece by piece: every part is some four times as long as those before it."""
        num_layers = len(self.layers)
        first = min(_NUM_FIRST_LAYERS, -(-num_layers // 8))
        hidden, start = self.embed(batch), 0
        for end in [end for end in (first, 4 * first) if end < num_layers] or [num_layers]:
            hidden = self.read_on(hidden, batch, cache, range(start, end))
            yield
            start = end
        return self.read_on(hidden, batch, cache, range(start, num_layers))

    def read_on(self, hidden: torch.Tensor, batch: PackedBatch, cache: KVCache, layers: range) -> torch.Tensor:
        """A part of `read`: what these layers make of what those before them made."""
        for i in layers:
            layer = self.layers[i]
            rotary = self.local_rotary if layer.is_local and self.local_rotary is not None else self.rotary
            hidden = layer(hidden, rotary, cache.keys[i], cache.values[i], batch)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of some rows, in the model's own dtype; `out` saves an allocation where it fits."""
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        softcap = self.config.final_softcap
        if softcap is None and self.head_tokens is None:
            return self.head(hidden, norm=self.norm, out=out)
        logits = self.head(hidden, norm=self.norm)
        if softcap is not None:
            logits = (torch.tanh(logits.float() / softcap) * softcap).to(logits.dtype)
        if self.head_tokens is None:
            return logits if out is None else out.copy_(logits)
        if out is None:
            out = logits.new_empty((len(logits), self.config.vocab_size))
        return out.fill_(-torch.inf).index_copy_(1, self.head_tokens, logits)

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        # The factor is rounded to the model's dtype, as in training.
        scale = torch.tensor(self.embedding_scale, dtype=self.dtype).item()
        if batch.sources is not None and batch.drafted is not None:
            from dsde.models.kernels import embedding

            return embedding.embed(batch.tokens, batch.sources, batch.drafted, self.embedding, scale)
        hidden = F.embedding(batch.tokens, self.embedding)
        return hidden if scale == 1.0 else hidden * scale
