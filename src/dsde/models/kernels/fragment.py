"""Products of 2 to 16 rows with a large weight, by matrix instructions fed straight from memory.

A thread loads 16 bytes of a weight row at a time and these are, as they are, four operands of matrix instructions: the
inner dimension is summed in another order than it is stored in, the same order for weight and input. So weights pass
through no shared memory and need no barrier; the loads of a block are under way before the block waits for its input.
Every warp of a block sums a part of the inner dimension of the same rows, and the parts are added up at the end.

Written in Gluon, Triton's language with explicit layouts. Takes 16-bit types only. Knows which of its tiles is best for
a shape, as measured on an H200, but not when a product is better left to another kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dsde.device.launch import programmatic_launch
from dsde.models.kernels.epilogue import finish, norm_scale
from dsde.models.kernels.gate import Activation
from dsde.models.kernels.norm import rms_norm

FEW_TOKENS = 8
"""As many inputs as one matrix instruction takes; the kernel takes up to twice as many."""

_ROWS = 16
"""As many weight rows as one matrix instruction takes: more rows in a block measured slower."""
_REGISTERS = 65536
_LANES = 32


@dataclass(frozen=True, slots=True)
class FragmentTile:
    """How a block multiplies its weight rows, gates included, with up to `tokens` inputs.

    In a step each of its `num_warps` warps takes `columns` of the inner dimension; weights are loaded `depth` steps
    ahead of their use.
    """

    tokens: int
    columns: int
    num_warps: int
    depth: int
    resident: int
    """blocks that a multiprocessor should hold at once, which bounds their registers"""
    norms: bool = True
    """whether the kernel norms its input itself, rather than another kernel before it"""


def choose_tile(num_tokens: int, num_rows: int, width: int, num_multiprocessors: int) -> FragmentTile:
    """The tile for `num_tokens` inputs and a weight of `num_rows` rows.

    Where all blocks of a product fit on the device at once they should, with as many loads under way as registers
    allow. Where there are more, blocks begin while others end, and what counts is that a block loads for most of its
    life: short rows want few warps.
    """
    blocks_each = triton.cdiv(triton.cdiv(num_rows, _ROWS), num_multiprocessors)
    if num_tokens > FEW_TOKENS:
        # Twice the inputs, twice the registers for them: with more warps on a multiprocessor tiles spill.
        if blocks_each <= 2:
            return _fitted(width, FragmentTile(16, columns=128, num_warps=8, depth=2, resident=2))
        return _fitted(width, FragmentTile(16, columns=64, num_warps=4, depth=4, resident=4))
    if blocks_each == 1:
        return _fitted(width, FragmentTile(8, columns=64, num_warps=16, depth=3, resident=1))
    if blocks_each == 2 and width <= 8192:
        return _fitted(width, FragmentTile(8, columns=64, num_warps=16, depth=2, resident=2))
    if blocks_each == 3:
        # Three blocks leave a thread too few registers to norm its input as well.
        return _fitted(width, FragmentTile(8, columns=64, num_warps=8, depth=3, resident=3, norms=False))
    if blocks_each > 3 and width <= 2048:
        return _fitted(width, FragmentTile(8, columns=64, num_warps=4, depth=4, resident=4))
    return _fitted(width, FragmentTile(8, columns=64, num_warps=8, depth=4, resident=2))


def _fitted(width: int, tile: FragmentTile) -> FragmentTile:
    """The tile with no more warps than find columns in a row."""
    return replace(tile, num_warps=min(tile.num_warps, triton.next_power_of_2(triton.cdiv(width, tile.columns))))


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
    outputs = _ROWS if gate is None else _ROWS // 2
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
        BLOCK_ROWS=_ROWS,
        COLUMNS=tile.columns,
        SPLITS=tile.num_warps,
        DEPTH=tile.depth,
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
def _sum_layout(splits: int, outputs: int, tokens: int, together: int) -> gl.BlockedLayout:
    """[splits, outputs * together, tokens], few splits to a lane, and all `together` rows of an output."""
    lanes_of_split = max(32 * splits // (outputs * tokens), 1)
    lanes_of_outputs = min(outputs, 32 // lanes_of_split)
    warps_of_outputs = min(outputs // lanes_of_outputs, splits)
    return gl.BlockedLayout(
        size_per_thread=[splits // lanes_of_split, together, 1],
        threads_per_warp=[lanes_of_split, lanes_of_outputs, 32 // (lanes_of_split * lanes_of_outputs)],
        warps_per_cta=[1, warps_of_outputs, splits // warps_of_outputs],
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
def _load(
    ptr: gl.tensor, column: gl.tensor, start: gl.tensor, WIDTH: tl.constexpr, STEP: tl.constexpr, POLICY: tl.constexpr
) -> gl.tensor:
    """Values of a step; zeros where it reaches past the end of a row."""
    if WIDTH % STEP == 0:
        return gl.load(ptr + start, eviction_policy=POLICY)
    return gl.load(ptr + start, mask=column + start < WIDTH, other=0.0, eviction_policy=POLICY)


@gluon.jit
def _norm(x: gl.tensor, norm: gl.tensor, squares: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """`x` times the norm weight, and the sum of its squares added to `squares`."""
    wide = x.to(gl.float32)
    return (wide * norm.to(gl.float32)).to(x.dtype), squares + gl.sum(wide * wide, axis=1)


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
    TOGETHER: tl.constexpr = 1 if GATE is None else 2
    BLOCK_OUTPUTS: tl.constexpr = BLOCK_ROWS // TOGETHER
    SUM: tl.constexpr = _sum_layout(SPLITS, BLOCK_OUTPUTS, BLOCK_TOKENS, 1)
    RESULT: tl.constexpr = gl.SliceLayout(0, SUM)

    row = gl.program_id(0) * BLOCK_ROWS + _index(BLOCK_ROWS, 1, WEIGHT)
    # Rows past the end repeat the last one, as do tokens: cheaper than a mask, and never written.
    if GATE is None:
        row = gl.minimum(row, num_outputs - 1).to(gl.int64)
    else:
        row = gl.minimum(row // 2, num_outputs - 1).to(gl.int64) + (row % 2) * num_outputs.to(gl.int64)
    weight_column = _index(SPLITS, 0, WEIGHT) * COLUMNS + _index(COLUMNS, 2, WEIGHT)
    weight_ptrs = weight_ptr + row * WIDTH + weight_column
    # The steps under way, a queue that exists while compiling only: to a type checker a tuple's length never changes.
    weights = ()
    for ahead in gl.static_range(min(DEPTH, NUM_STEPS)):
        loaded = _load(weight_ptrs, weight_column, ahead * STEP, WIDTH, STEP, "evict_first")
        weights += (loaded,)  # type: ignore[assignment]
    output = gl.program_id(0) * BLOCK_OUTPUTS + gl.arange(0, BLOCK_OUTPUTS, layout=gl.SliceLayout(1, RESULT))
    output = gl.expand_dims(output, 1)
    target_token = gl.expand_dims(gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(0, RESULT)), 0)
    target_ptr = out_ptr + target_token * out_stride + output
    is_target = (target_token < num_tokens) & (output < num_outputs)
    if PDL:
        tl.extra.cuda.gdc_wait()

    addend = 0.0
    if ADDS:
        addend = gl.load(target_ptr, mask=is_target, other=0.0).to(gl.float32)
    token = gl.minimum(_index(BLOCK_TOKENS, 2, INPUT), num_tokens - 1)
    input_column = _index(SPLITS, 0, INPUT) * COLUMNS + _index(COLUMNS, 1, INPUT)
    input_ptrs = x_ptr + token * x_stride + input_column
    result = gl.zeros((SPLITS, BLOCK_ROWS, BLOCK_TOKENS), gl.float32, layout=PRODUCT)
    squares = gl.zeros((SPLITS, BLOCK_TOKENS), gl.float32, layout=gl.SliceLayout(1, INPUT))
    for step in gl.static_range(NUM_STEPS):
        x = _load(input_ptrs, input_column, step * STEP, WIDTH, STEP, "")
        if norm_ptr is not None:
            norm = _load(norm_ptr + input_column, input_column, step * STEP, WIDTH, STEP, "")
            x, squares = _norm(x, norm, squares)
        result = mma_v2(weights[0], x, result)  # type: ignore[misc]
        weights = weights[1:]
        if step + DEPTH < NUM_STEPS:
            loaded = _load(weight_ptrs, weight_column, (step + DEPTH) * STEP, WIDTH, STEP, "evict_first")
            weights += (loaded,)  # type: ignore[assignment]

    parts = gl.convert_layout(result, _sum_layout(SPLITS, BLOCK_OUTPUTS, BLOCK_TOKENS, TOGETHER))
    total = gl.sum(parts, axis=0)
    gate_total = total
    if GATE is not None:
        pairs = gl.permute(gl.reshape(total, (BLOCK_OUTPUTS, 2, BLOCK_TOKENS)), (0, 2, 1))
        gate_total, total = gl.split(pairs)
        gate_total = gl.convert_layout(gate_total, RESULT, assert_trivial=True)
        total = gl.convert_layout(total, RESULT, assert_trivial=True)
    scale = 1.0
    if norm_ptr is not None:
        sum_of_squares = gl.sum(gl.convert_layout(squares, gl.SliceLayout(1, SUM)), axis=0)
        sum_of_squares = gl.convert_layout(sum_of_squares, gl.SliceLayout(0, RESULT), assert_trivial=True)
        scale = gl.expand_dims(norm_scale(sum_of_squares, eps, WIDTH), 0)
    total = finish(total, gate_total, scale, addend, bias_ptr, output, num_outputs, GATE)
    gl.store(target_ptr, total.to(out_ptr.dtype.element_ty), mask=is_target)
