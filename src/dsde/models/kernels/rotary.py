"""What lies between the QKV product and attention: norm of heads, rotation, the write to the KV cache, in one kernel.

The rotation is that of `layers.rotate`: half-split, cosines and sines from a table by position. Knows nothing of blocks
or sequences: a token's cache row is given as a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsde.device.launch import programmatic_launch

_HEADS_PER_PROGRAM = 8


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qk_norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotated queries [T, num_heads, head_dim]; rotated keys and plain values go to cache rows `slots` [T].

    `qkv` is [T, (num_heads + 2 * num_kv_heads) * head_dim], `table` [max_position, head_dim] with cosines first,
    `qk_norm_weight` [num_heads + num_kv_heads, head_dim]. A token whose slot is negative is padding: it is not stored.
    """
    num_tokens = qkv.shape[0]
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    pdl = programmatic_launch()
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS_PER_PROGRAM))](
        qkv,
        positions,
        slots,
        table,
        cache_k,
        cache_v,
        q,
        qk_norm_weight,
        eps,
        qkv.stride(0),
        cache_k.stride(0),
        cache_v.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=head_dim,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return q


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    table_ptr: tl.tensor,
    cache_k_ptr: tl.tensor,
    cache_v_ptr: tl.tensor,
    q_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    qkv_stride: tl.tensor,
    cache_k_stride: tl.tensor,
    cache_v_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = column < HALF
    is_rotated = head < HEADS + KV_HEADS
    if norm_ptr is not None:
        norm_offsets = head * DIM + column
        norm_low = tl.load(norm_ptr + norm_offsets, mask=is_rotated & inside, other=0.0).to(tl.float32)
        norm_high = tl.load(norm_ptr + norm_offsets + HALF, mask=is_rotated & inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    is_head = (head < HEADS + 2 * KV_HEADS) & inside
    head_ptr = qkv_ptr + token * qkv_stride + head * DIM + column
    low = tl.load(head_ptr, mask=is_head, other=0.0).to(tl.float32)
    high = tl.load(head_ptr + HALF, mask=is_head, other=0.0).to(tl.float32)
    angle_ptr = table_ptr + position * DIM + column
    cos = tl.load(angle_ptr, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(angle_ptr + HALF, mask=inside, other=0.0).to(tl.float32)

    query_or_key_low, query_or_key_high = low, high
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1, keep_dims=True) / DIM + eps)
        query_or_key_low = low * scale * norm_low
        query_or_key_high = high * scale * norm_high
    rotated_low = query_or_key_low * cos - query_or_key_high * sin
    rotated_high = query_or_key_high * cos + query_or_key_low * sin

    q_offsets = (token * HEADS + head) * DIM + column
    is_query = (head < HEADS) & inside
    tl.store(q_ptr + q_offsets, rotated_low, mask=is_query)
    tl.store(q_ptr + q_offsets + HALF, rotated_high, mask=is_query)
    is_stored = (slot >= 0) & is_head
    is_key = is_stored & (head >= HEADS) & is_rotated
    key_offsets = slot * cache_k_stride + (head - HEADS) * DIM + column
    tl.store(cache_k_ptr + key_offsets, rotated_low, mask=is_key)
    tl.store(cache_k_ptr + key_offsets + HALF, rotated_high, mask=is_key)
    is_value = is_stored & (head >= HEADS + KV_HEADS)
    value_offsets = slot * cache_v_stride + (head - HEADS - KV_HEADS) * DIM + column
    tl.store(cache_v_ptr + value_offsets, low, mask=is_value)
    tl.store(cache_v_ptr + value_offsets + HALF, high, mask=is_value)
