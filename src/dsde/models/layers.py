"""The parts that decoder layers are made of: rotary embedding, self-attention, gated MLP.

Every part works on packed tokens [num_tokens, ...] and holds plain tensors. Knows nothing of files, tensor names or
families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dsde.models.attention import paged_attention, write_kv
from dsde.models.batch import PackedBatch, Rotation
from dsde.models.config import Rope
from dsde.models.linear import Gate, Linear
from dsde.models.norm import RMSNorm


class Rotary:
    """Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

    def __init__(self, rope: Rope, head_dim: int, max_position: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
        self.table = table.to(device=device, dtype=dtype)
        """[max_position, head_dim]: cos, then sin"""

    def rotation(self, batch: PackedBatch) -> Rotation:
        """Made once for a batch, whichever layers ask for it."""
        rotation = batch.rotations.get(self)
        if rotation is None:
            cos, sin = self.table.index_select(0, batch.positions).unsqueeze(1).chunk(2, dim=-1)
            rotation = batch.rotations[self] = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return rotation


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] radians per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3_frequencies(frequencies, rope)
    if rope.scaling == "yarn":
        return _yarn_frequencies(frequencies, rope, head_dim)
    return frequencies


def _llama3_frequencies(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Keep what turns often within the original context, stretch what turns rarely, blend between."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(frequencies / rope.factor, frequencies, keep.clamp(0.0, 1.0))


def _yarn_frequencies(frequencies: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """The same blend, but linear in the dimension (arXiv 2309.00071, section 3.2)."""

    def dimension_turning(num_turns: float) -> float:
        wavelength = rope.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 1e-3)
    return torch.lerp(frequencies, frequencies / rope.factor, ramp.clamp(0.0, 1.0))


@dataclass(slots=True)
class SelfAttention:
    """Fused QKV projection of the normed input, optional norm of queries and keys, rotation, paged attention.

    The output projection belongs to the layer, which knows what becomes of its result.
    """

    qkv: Linear
    output: Linear
    qk_norm: RMSNorm | None
    """its weight is [num_heads + num_kv_heads, head_dim]: queries and keys are normed in one go"""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None

    def __call__(
        self,
        hidden: torch.Tensor,
        norm: RMSNorm,
        rotary: Rotary,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        batch: PackedBatch,
    ) -> torch.Tensor:
        qkv = self.qkv(hidden, norm=norm)
        attend = self._attend_plainly if batch.work is None else self._attend_with_kernels
        return attend(qkv, rotary, cache_k, cache_v, batch).flatten(1)

    def _attend_plainly(
        self, qkv: torch.Tensor, rotary: Rotary, cache_k: torch.Tensor, cache_v: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        qk = heads[:, :num_rotated]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, rotary.rotation(batch))
        write_kv(cache_k, cache_v, qk[:, self.num_heads :], heads[:, num_rotated:], batch.slots)
        q = qk[:, : self.num_heads]
        return paged_attention(q, cache_k, cache_v, batch, self.scale, self.window, self.softcap)

    def _attend_with_kernels(
        self, qkv: torch.Tensor, rotary: Rotary, cache_k: torch.Tensor, cache_v: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        from dsde.models.kernels import attention
        from dsde.models.kernels import rotary as rotary_kernel

        q = rotary_kernel.rotate_and_store(
            qkv,
            batch.positions,
            batch.slots,
            rotary.table,
            cache_k,
            cache_v,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            None if self.qk_norm is None else self.qk_norm.weight,
            0.0 if self.qk_norm is None else self.qk_norm.eps,
        )
        assert batch.work is not None
        return attention.paged_attention(q, cache_k, cache_v, batch.work, self.scale, self.window, self.softcap)


@dataclass(slots=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))` with gate and up fused, gate first."""

    gate_up: Linear
    down: Linear
    gate: Gate

    def __call__(self, hidden: torch.Tensor, norm: RMSNorm, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.gate_up(hidden, norm=norm, gate=self.gate), residual=residual)
