"""Products of few rows with a large weight: what a decode step is made of, bound by reading the weight once.

Two kernels. The row kernel keeps whole weight rows in registers and needs no matrix instructions: best for a handful of
tokens, since every byte of a block is under way before the block waits for its input. The dot kernel streams tiles
through shared memory into tensor cores. Both fuse what surrounds a product in a decoder layer: the norm of the input, a
bias, the gate of an MLP, the addition to the residual stream. Neither uses atomics, so results are deterministic.

Knows nothing of layers, nor when a product is too large for it; `MAX_TOKENS` is as far as it goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsde.models.kernels import fragment
from dsde.models.kernels.epilogue import finish, norm_scale
from dsde.models.kernels.fragment import FragmentTile
from dsde.models.kernels.gate import Activation
from dsde.models.kernels.launch import programmatic_launch

MAX_TOKENS = 64
_FASTER_UP_TO = 4

_MAX_ROW_WIDTH = 16384
"""The widest row the row kernel takes whole: 64 values for each of 256 threads."""
_MAX_ROW_TOKENS = 4


@dataclass(frozen=True, slots=True)
class RowTile:
    """What a block of the row kernel covers: `outputs` whole weight rows (twice that with a gate), times all inputs.

    Inputs are taken `tokens` at a time, while the weight rows stay in registers.
    """

    tokens: int
    outputs: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class DotTile:
    """What a block of the dot kernel covers: `outputs` weight rows times `tokens` inputs.

    A pass of its loop takes `splits * columns` of the inner dimension; each split is summed by warps of its own.
    """

    tokens: int
    outputs: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int
    prefetch: int = 0
    """columns fetched into the L2 cache before the kernel ahead has finished"""


Tile = RowTile | DotTile | FragmentTile


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    gate: Activation | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` [M, K] of at most `MAX_TOKENS` rows and `weight` [N, K].

    `norm_weight` [K]: `x` is RMS-normed first. `gate`: the first half of the weight's rows gives gates, the second what
    they let through, and the result is [M, N / 2]. `residual` [M, N]: the result is added to it in place, and it is
    returned. `out` receives the result otherwise; without it a tensor is made, of `out_dtype` or the dtype of `x`.
    `tile` overrides what the shape suggests.
    """
    num_tokens, width = x.shape
    num_outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_tokens, num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    if tile is None:
        tile = choose_tile(num_tokens, num_outputs, width, gate is not None, x.element_size())
    if isinstance(tile, FragmentTile):
        fragment.multiply(x, weight, bias, norm_weight, norm_eps, gate, out, residual is not None, tile)
        return out
    pdl = programmatic_launch()
    arguments = (x, weight, bias, norm_weight, out, num_tokens, num_outputs, x.stride(0), out.stride(0), norm_eps)
    grid = (triton.cdiv(num_outputs, tile.outputs),)
    if isinstance(tile, RowTile):
        _row_kernel[grid](
            *arguments,
            WIDTH=width,
            BLOCK_TOKENS=tile.tokens,
            BLOCK_OUTPUTS=tile.outputs,
            BLOCK_WIDTH=triton.next_power_of_2(width),
            GROUPS=triton.cdiv(num_tokens, tile.tokens),
            GATE=gate,
            ADDS=residual is not None,
            PDL=pdl,
            num_warps=tile.num_warps,
            launch_pdl=pdl,
        )
    else:
        _dot_kernel[grid](
            *arguments,
            WIDTH=width,
            BLOCK_TOKENS=tile.tokens,
            BLOCK_OUTPUTS=tile.outputs,
            BLOCK_COLUMNS=tile.columns,
            SPLITS=tile.splits,
            PREFETCH=tile.prefetch if pdl and tile.prefetch <= width else 0,
            GATE=gate,
            ADDS=residual is not None,
            PDL=pdl,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            launch_pdl=pdl,
        )
    return out


def is_skinny(num_tokens: int, weight: torch.Tensor) -> bool:
    """Whether `skinny_linear` beats the vendor's library for so many rows and this weight."""
    return num_tokens <= _FASTER_UP_TO and weight.is_contiguous()


def choose_tile(num_tokens: int, num_outputs: int, width: int, gated: bool, element_size: int) -> Tile:
    """The tile for a product of this shape; a row's result depends on its `tokens`, but not on `num_tokens` itself."""
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"at most {MAX_TOKENS} rows, not {num_tokens}")
    if num_tokens <= _MAX_ROW_TOKENS and width <= _MAX_ROW_WIDTH:
        return _choose_row_tile(num_tokens, width, gated, element_size)
    return _choose_dot_tile(num_tokens, width, gated, element_size)


def _choose_row_tile(num_tokens: int, width: int, gated: bool, element_size: int) -> RowTile:
    block_width = triton.next_power_of_2(width)
    block_bytes = 32768 if block_width <= 8192 else 65536
    outputs = min(max(block_bytes // (block_width * element_size), 1), 16)
    if gated:
        outputs = max(outputs // 2, 1)
    num_warps = 4 if block_width <= 1024 else 8 if block_width <= 8192 else 16
    return RowTile(1 if num_tokens == 1 else 4, outputs, num_warps)


def _choose_dot_tile(num_tokens: int, width: int, gated: bool, element_size: int) -> DotTile:
    tokens = max(triton.next_power_of_2(num_tokens), 8)
    columns = min(max(triton.next_power_of_2(width), 16), 256)
    if element_size > 2:
        return DotTile(tokens, 16, min(columns, 64), 1, 4, 2)
    if tokens <= 16:
        return DotTile(tokens, 16 if gated else 32, columns, 1, 4, 4, prefetch=512)
    return DotTile(tokens, 32 if gated else 64, min(columns, 128), 1, 4, 4, prefetch=256)


@triton.jit(do_not_specialize=["num_tokens", "num_outputs"])
def _row_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Rows past the end repeat the last one: cheaper than a mask, and never written.
    row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    # All operands are [tokens, outputs, width] from the start, so that they share one layout and meet in registers.
    column = tl.arange(0, BLOCK_WIDTH)[None, None, :]
    inside = column < WIDTH
    row_ptr = weight_ptr + row[None, :, None] * WIDTH + column
    if GATE is not None:
        gate_weight = tl.load(row_ptr, mask=inside, other=0.0, eviction_policy="evict_first")
        row_ptr += num_outputs.to(tl.int64) * WIDTH
    weight = tl.load(row_ptr, mask=inside, other=0.0, eviction_policy="evict_first")
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    for group in range(GROUPS):
        token = group * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        target_ptr = out_ptr + token[:, None] * out_stride + output[None, :]
        is_target = (token[:, None] < num_tokens) & (output[None, :] < num_outputs)
        addend = 0.0
        if ADDS:
            addend = tl.load(target_ptr, mask=is_target, other=0.0).to(tl.float32)
        is_input = inside & (token[:, None, None] < num_tokens)
        x = tl.load(x_ptr + token[:, None, None] * x_stride + column, mask=is_input, other=0.0).to(tl.float32)
        scale = 1.0
        if norm_ptr is not None:
            scale = norm_scale(tl.sum(x * x, axis=2), eps, WIDTH)
            x *= norm.to(tl.float32)
        result = tl.sum(x * weight.to(tl.float32), axis=2)
        gate_result = result
        if GATE is not None:
            gate_result = tl.sum(x * gate_weight.to(tl.float32), axis=2)
        result = finish(result, gate_result, scale, addend, bias_ptr, output[None, :], num_outputs, GATE)
        tl.store(target_ptr, result, mask=is_target)


@triton.jit(do_not_specialize=["num_tokens", "num_outputs"])
def _dot_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: tl.constexpr = SPLITS * BLOCK_COLUMNS
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Rows past the end repeat the last one: cheaper than a mask, and never written.
    row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    up_offset = num_outputs.to(tl.int64) * WIDTH
    if PREFETCH > 0:
        # A cache line is 128 bytes, 64 values of the 16-bit types.
        line_ptr = weight_ptr + row[:, None] * WIDTH + 64 * tl.arange(0, PREFETCH // 64)[None, :]
        _prefetch(line_ptr)
        if GATE is not None:
            _prefetch(line_ptr + up_offset)
    token = tl.arange(0, BLOCK_TOKENS)
    if SPLITS == 1:
        column = tl.arange(0, BLOCK_COLUMNS)
        weight_column, x_column = column[None, :], column[:, None]
        weight_row_ptr, x_row_ptr = weight_ptr + row[:, None] * WIDTH, x_ptr + token[None, :] * x_stride
        is_token = token[None, :] < num_tokens
        result = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
        squares = tl.zeros((BLOCK_COLUMNS, BLOCK_TOKENS), tl.float32)
    else:
        split_column = tl.arange(0, SPLITS)[:, None] * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        weight_column, x_column = split_column[:, None, :], split_column[:, :, None]
        weight_row_ptr = weight_ptr + row[None, :, None] * WIDTH
        x_row_ptr = x_ptr + token[None, None, :] * x_stride
        is_token = token[None, None, :] < num_tokens
        result = tl.zeros((SPLITS, BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
        squares = tl.zeros((SPLITS, BLOCK_COLUMNS, BLOCK_TOKENS), tl.float32)
    gate_result = result
    target_ptr = out_ptr + token[None, :] * out_stride + output[:, None]
    is_target = (token[None, :] < num_tokens) & (output[:, None] < num_outputs)
    if PDL:
        tl.extra.cuda.gdc_wait()
    addend = 0.0
    if ADDS:
        addend = tl.load(target_ptr, mask=is_target, other=0.0).to(tl.float32)

    for start in range(0, WIDTH, STEP):
        weight_columns, x_columns = start + weight_column, start + x_column
        weight_tile_ptr = weight_row_ptr + weight_columns
        if WIDTH % STEP == 0:
            x = tl.load(x_row_ptr + x_columns, mask=is_token, other=0.0)
        else:
            x = tl.load(x_row_ptr + x_columns, mask=is_token & (x_columns < WIDTH), other=0.0)
        if norm_ptr is not None:
            if WIDTH % STEP == 0:
                norm = tl.load(norm_ptr + x_columns)
            else:
                norm = tl.load(norm_ptr + x_columns, mask=x_columns < WIDTH, other=0.0)
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * norm.to(tl.float32)).to(x.dtype)
        if GATE is not None:
            if WIDTH % STEP == 0:
                gate_weight = tl.load(weight_tile_ptr, eviction_policy="evict_first")
            else:
                gate_weight = tl.load(weight_tile_ptr, mask=weight_columns < WIDTH, other=0.0)
            gate_result = tl.dot(gate_weight, x, gate_result, input_precision="ieee")
            weight_tile_ptr += up_offset
        if WIDTH % STEP == 0:
            weight = tl.load(weight_tile_ptr, eviction_policy="evict_first")
        else:
            weight = tl.load(weight_tile_ptr, mask=weight_columns < WIDTH, other=0.0)
        result = tl.dot(weight, x, result, input_precision="ieee")

    if SPLITS > 1:
        result = tl.sum(result, axis=0)
        gate_result = tl.sum(gate_result, axis=0)
        squares = tl.sum(squares, axis=0)
    scale = 1.0
    if norm_ptr is not None:
        scale = norm_scale(tl.sum(squares, axis=0), eps, WIDTH)[None, :]
    result = finish(result, gate_result, scale, addend, bias_ptr, output[:, None], num_outputs, GATE)
    tl.store(target_ptr, result, mask=is_target)


@triton.jit
def _prefetch(line_ptr: tl.tensor) -> None:
    """Bring the cache lines that the pointers point into to L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [line_ptr], dtype=tl.int32, is_pure=False, pack=1
    )
