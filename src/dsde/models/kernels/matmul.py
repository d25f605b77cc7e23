"""Products of few rows with a large weight: what a decode step is made of, bound by reading the weight once.

Two kernels, and the rules that choose between them and their tiles. The row kernel, here, keeps whole weight rows in
registers and needs no matrix instructions: every byte of a block is under way before the block waits for its input,
which is best for one row, or two of a large weight. From two rows on, matrix instructions pay: fragment.py. Both fuse
what surrounds a product in a decoder layer: the norm of the input, a bias, the gate of an MLP, the addition to the
residual stream. Neither uses atomics, so results are deterministic.

`is_skinny` says for which products this beats the vendor's library. Knows nothing of layers, nor of that library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsde.device import backend
from dsde.device.launch import programmatic_launch
from dsde.models.kernels import fragment
from dsde.models.kernels.epilogue import finish, norm_scale
from dsde.models.kernels.fragment import FragmentTile
from dsde.models.kernels.gate import Activation

MAX_TOKENS = 16
_MAX_SINGLE_TOKENS = 4
"""In float32, which the matrix instructions do not take."""

_MAX_ROW_WIDTH = 16384
"""The widest row the row kernel takes whole: 32 values for each of 512 threads."""
_MAX_WIDTH = 32768
"""The fragment kernel unrolls its loop over the inner dimension, and compiling it takes ever longer."""
_WIDTH_MULTIPLE = 8
"""Rows that do not begin at multiples of 16 bytes cannot be read 16 bytes at a time."""

_LARGE_WEIGHT = 1 << 26
"""Values of a weight whose blocks fill the device so many times over that only the work of each block counts."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """What a block of the row kernel covers: `outputs` whole weight rows (twice that with a gate) times all inputs.

    There may be `tokens` of them at most.
    """

    tokens: int
    outputs: int
    num_warps: int


Tile = RowTile | FragmentTile


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
    tile: Tile | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` [M, K] of at most `MAX_TOKENS` rows and `weight` [N, K].

    `norm_weight` [K]: `x` is RMS-normed first. `gate`: the first half of the weight's rows gives gates, the second what
    they let through, and the result is [M, N / 2]. `residual` [M, N]: the result is added to it in place, and it is
    returned. `out` receives the result otherwise; without it a tensor is made.
    `tile` overrides what the shape suggests.
    """
    num_tokens, width = x.shape
    num_outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    if tile is None:
        tile = choose_tile(num_tokens, weight, gate is not None)
    if isinstance(tile, FragmentTile):
        fragment.multiply(x, weight, bias, norm_weight, norm_eps, gate, out, residual is not None, tile)
        return out
    pdl = programmatic_launch()
    _row_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x,
        weight,
        bias,
        norm_weight,
        out,
        num_tokens,
        num_outputs,
        x.stride(0),
        out.stride(0),
        norm_eps,
        WIDTH=width,
        BLOCK_TOKENS=tile.tokens,
        BLOCK_OUTPUTS=tile.outputs,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        GATE=gate,
        ADDS=residual is not None,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    return out


def is_skinny(num_tokens: int, weight: torch.Tensor) -> bool:
    """Whether `skinny_linear` takes so many rows of this weight, and is faster than the vendor's library."""
    if not weight.is_contiguous():
        return False
    width = weight.shape[1]
    if weight.element_size() > 2:
        return num_tokens <= _MAX_SINGLE_TOKENS and width <= _MAX_ROW_WIDTH
    if num_tokens == 1 and width <= _MAX_ROW_WIDTH:
        return True
    if width > _MAX_WIDTH or width % _WIDTH_MULTIPLE != 0:
        return False
    # Twice the work to a byte of weight: large ones, bound by nothing else, reach 88 to 99 % of the library's pace.
    most = MAX_TOKENS if weight.numel() <= _LARGE_WEIGHT else fragment.FEW_TOKENS
    return num_tokens <= most


def choose_tile(num_tokens: int, weight: torch.Tensor, gated: bool) -> Tile:
    """The tile for a product with this weight; a row's result depends on the tile, but not on the rows beside it."""
    width = weight.shape[1]
    is_single = weight.element_size() > 2
    if num_tokens > (_MAX_SINGLE_TOKENS if is_single else MAX_TOKENS):
        raise ValueError(f"too many rows: {num_tokens}")
    if width > (_MAX_ROW_WIDTH if is_single else _MAX_WIDTH):
        raise ValueError(f"rows too wide: {width}")
    if is_single or (num_tokens == 1 and width <= _MAX_ROW_WIDTH):
        return _row_tile(num_tokens, width, gated, weight.element_size())
    if num_tokens == 2 and weight.numel() > _LARGE_WEIGHT:
        # Twice the work of one row is still less than that of a matrix instruction, which is made for eight.
        outputs = (4096 if gated else 8192) // triton.next_power_of_2(width)
        if outputs > 0:
            return RowTile(tokens=2, outputs=outputs, num_warps=4)
    return fragment.choose_tile(num_tokens, weight.shape[0], width, backend.num_multiprocessors(weight.device))


def _row_tile(num_tokens: int, width: int, gated: bool, element_size: int) -> RowTile:
    """32 KiB of weights to a block, more only where a row is longer: as measured for one row."""
    block_width = triton.next_power_of_2(width)
    block_bytes = 32768 if block_width <= 8192 else 65536
    outputs = min(max(block_bytes // (block_width * element_size), 1), 16)
    if gated:
        outputs = max(outputs // 2, 1)
    num_warps = 4 if block_width <= 1024 else 8 if block_width <= 8192 else 16
    return RowTile(1 if num_tokens == 1 else _MAX_SINGLE_TOKENS, outputs, num_warps)


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

    token = tl.arange(0, BLOCK_TOKENS)
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
