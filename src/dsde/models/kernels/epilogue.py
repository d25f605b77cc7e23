"""What a product of few rows ends with, the same in every kernel: norm scale, bias, gate, residual stream.

Knows nothing of how the products themselves are computed or laid out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsde.models.kernels.gate import activate


@triton.jit
def norm_scale(sum_of_squares: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    return tl.rsqrt(sum_of_squares / WIDTH + eps)


@triton.jit
def finish(
    result: tl.tensor,
    gate_result: tl.tensor,
    scale: tl.tensor,
    addend: tl.tensor,
    bias_ptr: tl.tensor,
    output: tl.tensor,
    num_outputs: tl.tensor,
    GATE: tl.constexpr,
) -> tl.tensor:
    """What becomes of a tile of products: scaled by the norm, biased, gated, added to the residual stream."""
    result *= scale
    if bias_ptr is not None:
        has_bias = output < num_outputs
        up_ptr = bias_ptr + output
        if GATE is not None:
            up_ptr += num_outputs
        result += tl.load(up_ptr, mask=has_bias, other=0.0).to(tl.float32)
    if GATE is not None:
        gate_result *= scale
        if bias_ptr is not None:
            gate_result += tl.load(bias_ptr + output, mask=has_bias, other=0.0).to(tl.float32)
        result *= activate(gate_result, GATE)
    return result + addend
