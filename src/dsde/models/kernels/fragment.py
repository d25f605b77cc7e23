"""Products of 2 to 16 rows with a large weight, by matrix instructions fed straight from memory.

A thread loads 16 bytes of a weight row at a time and these are, as they are, four operands of matrix instructions: the
inner dimension is summed in another order than it is stored in, the same order for weight and input. So weights pass
through no shared memory and need no barrier; the loads of a block are under way before the block waits for its input.
Every warp of a block sums a part of the inner dimension of the same rows, and the parts are added up at the end.

Written in Gluon, Triton's language with explicit layouts. Takes 16-bit types only, and knows nothing of when it is best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dsde.models.kernels.epilogue import finish, norm_scale
from dsde.models.kernels.gate import Activation
from dsde.models.kernels.launch import programmatic_launch
from dsde.models.kernels.norm import rms_norm

_REGISTERS = 65536
_LANES = 32


@dataclass(frozen=True, slots=True)
class FragmentTile:
    """What a block covers: `rows` weight rows (gates included) times `tokens` inputs.

    In a step each of its `num_warps` warps takes `columns` of the inner dimension; weights are loaded `depth` steps
    ahead of their use.
    """

    tokens: int
    rows: int
    columns: int
    num_warps: int
    depth: int
    resident: int
    """blocks that a multiprocessor should hold at once, which bounds their registers"""
    norms: bool = True
    """whether the kernel norms its input itself, rather than another kernel before it"""
    bypass: bool = False
    """whether weights are kept out of the L1 cache"""


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    gate: Activation | None,
    out: torch.Tensor,
    adds: bool,
    tile: FragmentTile,
) -> None:
    """The product of `x` and `weight`, into `out` or added to it; see `matmul.skinny_linear`."""
    num_tokens, width = x.shape
    num_outputs = out.shape[1]
    if norm_weight is not None and not tile.norms:
        x, norm_weight = rms_norm(x, norm_weight, norm_eps), None
    outputs = tile.rows if gate is None else tile.rows // 2
    pdl = programmatic_launch()
    _fragment_kernel[(triton.cdiv(num_outputs, outputs),)](
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
        BLOCK_ROWS=tile.rows,
        COLUMNS=tile.columns,
        SPLITS=tile.num_warps,
        DEPTH=tile.depth,
        CACHE=".cg" if tile.bypass else "",
        GATE=gate,
        ADDS=adds,
        PDL=pdl,
        num_warps=tile.num_warps,
        maxnreg=max_registers(tile),
        launch_pdl=pdl,
    )


def max_registers(tile: FragmentTile) -> int:
    """Of a thread, so that as many blocks as the tile wants share the registers of a multiprocessor."""
    return min(_REGISTERS // (tile.resident * tile.num_warps * _LANES) // 8 * 8, 255)


@gluon.constexpr_function
def _product_layout(splits: int) -> gl.NVMMADistributedLayout:
    """[splits, rows, tokens], a warp to every split."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[splits, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _sum_layout(splits: int, rows: int, tokens: int, is_gated: bool) -> gl.BlockedLayout:
    """[splits, rows, tokens], few splits to a lane, and neighbouring rows together where one is the gate of the other."""
    together = 2 if is_gated else 1
    row_groups = rows // together
    lanes_of_split = max(32 * splits // (row_groups * tokens), 1)
    lanes_of_rows = min(row_groups, 32 // lanes_of_split)
    warps_of_rows = min(row_groups // lanes_of_rows, splits)
    return gl.BlockedLayout(
        size_per_thread=[splits // lanes_of_split, together, 1],
        threads_per_warp=[lanes_of_split, lanes_of_rows, 32 // (lanes_of_split * lanes_of_rows)],
        warps_per_cta=[1, warps_of_rows, splits // warps_of_rows],
        order=[1, 2, 0],
    )


@gluon.jit
def _index(SIZE: tl.constexpr, AXIS: tl.constexpr, LAYOUT: tl.constexpr) -> gl.tensor:
    """0, 1, ... along one axis of three."""
    FIRST: tl.constexpr = 1 if AXIS == 0 else 0
    SECOND: tl.constexpr = 1 if AXIS == 2 else 2
    flat = gl.arange(0, SIZE, layout=gl.SliceLayout(FIRST, gl.SliceLayout(SECOND, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(flat, FIRST), SECOND)


@gluon.jit
def _load_weight(
    ptr: gl.tensor, column: gl.tensor, start: gl.tensor, WIDTH: tl.constexpr, STEP: tl.constexpr, CACHE: tl.constexpr
) -> gl.tensor:
    POLICY: tl.constexpr = "evict_first" if CACHE == "" else ""
    if WIDTH % STEP == 0:
        return gl.load(ptr + start, cache_modifier=CACHE, eviction_policy=POLICY)
    else:
        inside = column + start < WIDTH
        return gl.load(ptr + start, mask=inside, other=0.0, cache_modifier=CACHE, eviction_policy=POLICY)


@gluon.jit
def _load_input(
    ptr: gl.tensor, column: gl.tensor, start: gl.tensor, is_token: gl.tensor, WIDTH: tl.constexpr, STEP: tl.constexpr
) -> gl.tensor:
    if WIDTH % STEP != 0:
        is_token = is_token & (column + start < WIDTH)
    return gl.load(ptr + start, mask=is_token, other=0.0)


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs"])
def _fragment_kernel(
    x_ptr: gl.tensor,
    weight_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    norm_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_tokens: gl.tensor,
    num_outputs: gl.tensor,
    x_stride: gl.tensor,
    out_stride: gl.tensor,
    eps: gl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
    CACHE: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: tl.constexpr = SPLITS * COLUMNS
    NUM_STEPS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    PRODUCT: tl.constexpr = _product_layout(SPLITS)
    # Eight values of 16 bits in a row make the 16 bytes of a load.
    WEIGHT: tl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    INPUT: tl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)

    first_row = gl.program_id(0) * BLOCK_ROWS
    row = first_row + _index(BLOCK_ROWS, 1, WEIGHT)
    # Rows past the end repeat the last one: cheaper than a mask, and never written.
    if GATE is None:
        row = gl.minimum(row, num_outputs - 1).to(gl.int64)
    else:
        row = gl.minimum(row // 2, num_outputs - 1).to(gl.int64) + (row % 2) * num_outputs.to(gl.int64)
    weight_column = _index(SPLITS, 0, WEIGHT) * COLUMNS + _index(COLUMNS, 2, WEIGHT)
    weight_ptrs = weight_ptr + row * WIDTH + weight_column
    weights = ()
    for ahead in gl.static_range(min(DEPTH, NUM_STEPS)):
        weights = weights + (_load_weight(weight_ptrs, weight_column, ahead * STEP, WIDTH, STEP, CACHE),)
    if PDL:
        tl.extra.cuda.gdc_wait()

    token = _index(BLOCK_TOKENS, 2, INPUT)
    is_token = token < num_tokens
    input_column = _index(SPLITS, 0, INPUT) * COLUMNS + _index(COLUMNS, 1, INPUT)
    input_ptrs = x_ptr + token * x_stride + input_column
    result = gl.zeros((SPLITS, BLOCK_ROWS, BLOCK_TOKENS), gl.float32, layout=PRODUCT)
    squares = gl.zeros((SPLITS, BLOCK_TOKENS), gl.float32, layout=gl.SliceLayout(1, INPUT))
    ahead_x = _load_input(input_ptrs, input_column, 0, is_token, WIDTH, STEP)
    for step in gl.static_range(NUM_STEPS):
        x = ahead_x
        if step + 1 < NUM_STEPS:
            ahead_x = _load_input(input_ptrs, input_column, (step + 1) * STEP, is_token, WIDTH, STEP)
        if norm_ptr is not None:
            norm = _load_input(norm_ptr + input_column, input_column, step * STEP, input_column >= 0, WIDTH, STEP)
            wide = x.to(gl.float32)
            squares += gl.sum(wide * wide, axis=1)
            x = (wide * norm.to(gl.float32)).to(x.dtype)
        result = mma_v2(weights[0], x, result)
        if step + DEPTH < NUM_STEPS:
            ahead_weight = _load_weight(weight_ptrs, weight_column, (step + DEPTH) * STEP, WIDTH, STEP, CACHE)
            weights = weights[1:] + (ahead_weight,)
        else:
            weights = weights[1:]

    SUM: tl.constexpr = _sum_layout(SPLITS, BLOCK_ROWS, BLOCK_TOKENS, GATE is not None)
    total = gl.sum(gl.convert_layout(result, SUM), axis=0)
    gate_total = total
    if GATE is not None:
        pairs = gl.reshape(total, (BLOCK_ROWS // 2, 2, BLOCK_TOKENS))
        gate_total, total = gl.split(gl.permute(pairs, (0, 2, 1)))
    BLOCK_OUTPUTS: tl.constexpr = total.shape[0]
    RESULT: tl.constexpr = total.type.layout
    scale = 1.0
    if norm_ptr is not None:
        sum_of_squares = gl.sum(gl.convert_layout(squares, gl.SliceLayout(1, SUM)), axis=0)
        sum_of_squares = gl.convert_layout(sum_of_squares, gl.SliceLayout(0, RESULT))
        scale = gl.expand_dims(norm_scale(sum_of_squares, eps, WIDTH), 0)
    output = gl.program_id(0) * BLOCK_OUTPUTS + gl.arange(0, BLOCK_OUTPUTS, layout=gl.SliceLayout(1, RESULT))
    output = gl.expand_dims(output, 1)
    target_token = gl.expand_dims(gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(0, RESULT)), 0)
    target_ptr = out_ptr + target_token * out_stride + output
    is_target = (target_token < num_tokens) & (output < num_outputs)
    addend = 0.0
    if ADDS:
        addend = gl.load(target_ptr, mask=is_target, other=0.0).to(gl.float32)
    total = finish(total, gate_total, scale, addend, bias_ptr, output, num_outputs, GATE)
    gl.store(target_ptr, total.to(out_ptr.dtype.element_ty), mask=is_target)
