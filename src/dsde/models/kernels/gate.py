"""The gate of a gated MLP: `activation(gate) * up`, where both lie side by side in the rows of one matrix.

Also the home of the activations, which products of few rows apply to their own results. Knows nothing of products.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from dsde.device.launch import programmatic_launch

Activation = Literal["silu", "gelu_tanh"]

_BLOCK = 1024


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[T, F] from [T, 2F]: the first half of every row, activated, times the second."""
    num_tokens, doubled = gate_up.shape
    width = doubled // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    pdl = programmatic_launch()
    _gated_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        gate_up,
        out,
        width,
        gate_up.stride(0),
        ACTIVATION=activation,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """`x` in float32. GELU's tanh form is written with the sigmoid it equals: 0.5 * (1 + tanh(z)) = sigmoid(2z)."""
    if ACTIVATION == "silu":
        slope = x
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(slope)


@triton.jit
def _gated_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row_ptr = gate_up_ptr + token * stride
    gate = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, activate(gate, ACTIVATION) * up, mask=inside)
