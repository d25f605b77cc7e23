"""Root-mean-square norm of rows, where the product that follows does not norm them itself.

Arithmetic in float32 whatever the dtypes of rows and weight. Knows nothing of the layers around it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsde.device.launch import programmatic_launch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [T, K] normed over its last dimension, times `weight` [K], in the dtype of `x`."""
    num_tokens, width = x.shape
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    pdl = programmatic_launch()
    _rms_norm_kernel[(num_tokens,)](
        x,
        weight,
        out,
        x.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + token * WIDTH + columns, x * scale * weight, mask=inside)
