"""Attention of one new token per sequence over a slot's keys and values: a Triton kernel, and plain PyTorch.

The kernel reads only as many keys as a sequence has, so that slots of any length lie side by side in one batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without CUDA
    triton = None

_BLOCK = 64
_MIN_ROWS = 16
"""the least that the matrix units multiply; a KV head's few query heads are padded to it"""


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """q [slots, heads, dim]; keys and values [slots, kv heads, context, dim]; lengths [slots], all at least 1."""
    if not q.is_cuda:
        return _plain(q, keys, values, lengths)
    slots, heads, dim = q.shape
    out = torch.empty_like(q)
    _kernel[(slots, keys.shape[1])](
        q.contiguous(), keys, values, lengths, out, dim**-0.5, keys.stride(0), keys.stride(1),
        HEADS=heads, GROUP=heads // keys.shape[1], ROWS=_MIN_ROWS, DIM=dim, BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def _plain(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    seen = torch.arange(keys.shape[2], device=q.device) < lengths[:, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True)[:, :, 0]


if triton is not None:

    @triton.jit
    def _kernel(
        q, keys, values, lengths, out, scale, slot_stride, head_stride,
        HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        slot, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        length = tl.load(lengths + slot)
        rows, dims, columns = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, BLOCK)
        heads = (slot * HEADS + kv_head * GROUP + rows)[:, None] * DIM + dims[None, :]
        query = tl.load(q + heads, mask=rows[:, None] < GROUP, other=0.0)
        base = slot * slot_stride + kv_head * head_stride
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIM), tl.float32)
        for start in range(0, length, BLOCK):
            at = start + columns
            inside = at[:, None] < length
            where = base + at[:, None] * DIM + dims[None, :]
            key = tl.load(keys + where, mask=inside, other=0.0)
            value = tl.load(values + where, mask=inside, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(at[None, :] < length, score, float("-inf"))
            new_best = tl.maximum(best, tl.max(score, 1))
            weight = tl.exp(score - new_best[:, None])
            shrink = tl.exp(best - new_best)
            total = total * shrink + tl.sum(weight, 1)
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            best = new_best
        mixed = mixed / total[:, None]
        tl.store(out + heads, mixed.to(out.dtype.element_ty), mask=rows[:, None] < GROUP)
