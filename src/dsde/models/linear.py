"""A matrix that rows are multiplied with, in the layout this machine multiplies fastest.

What comes right before or after a product in a decoder layer (a norm, a gate, the residual) is part of the call, so
that a device with kernels for it can do all of it in one pass over the weights. Inference only: holds plain tensors, no
parameters and no gradients. Knows nothing of models or names.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from dsde.device import backend
from dsde.models.norm import RMSNorm

Gate = Literal["silu", "gelu_tanh"]

_ROWS_HINT = 8
"""oneDNN lays weights out for about this many rows; 4 to 64 measured alike, 1 is up to 40 % slower."""
_MIN_ROWS = 3
"""oneDNN takes longer for 1 or 2 rows than for 3 or 4, so fewer are repeated, which saves about 15 %."""


class Linear:
    """`x @ weight.T + bias` with weight [out, in]. On CPU in float32 only a packed copy of the weight is kept.

    Packing makes 1 to 5 rows cost the same and 16 half as much again, which is what makes verifying a draft cheap on a
    CPU. As measured, a row's result does not depend on how many rows lie beside it; oneDNN does not promise that.
    """

    __slots__ = ("bias", "has_kernels", "is_packed", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.is_packed = _can_pack(weight)
        self.has_kernels = weight.is_cuda and backend.has_kernels(weight.device)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if self.is_packed else weight

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        gate: Gate | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of the (normed) rows.

        With a gate the first half of the result is activated and multiplied with the second. With a residual the result
        is added to it in place, and it is what is returned. `out` receives a plain product.
        """
        if self.has_kernels:
            return self._on_device(x, norm, gate, residual, out)
        result = self._product(x if norm is None else norm(x))
        if gate is not None:
            halves = result.chunk(2, dim=-1)
            result = activate(halves[0], gate).mul_(halves[1])
        if residual is not None:
            return residual.add_(result)
        return result if out is None else out.copy_(result)

    def _on_device(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None,
        gate: Gate | None,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        from dsde.models.kernels import gate as gate_kernel
        from dsde.models.kernels import matmul

        if matmul.is_skinny(x.shape[0], self.weight):
            return matmul.skinny_linear(
                x,
                self.weight,
                self.bias,
                norm_weight=None if norm is None else norm.weight,
                norm_eps=0.0 if norm is None else norm.eps,
                gate=gate,
                residual=residual,
                out=out,
            )
        x = x if norm is None else norm(x)
        if residual is not None:
            if self.bias is not None:
                residual.add_(self.bias)
            return residual.addmm_(x, self.weight.t())
        if out is not None:
            torch.mm(x, self.weight.t(), out=out)
            return out if self.bias is None else out.add_(self.bias)
        result = F.linear(x, self.weight, self.bias)
        return result if gate is None else gate_kernel.gated(result, gate)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_packed:
            return F.linear(x, self.weight, self.bias)
        num_rows = x.shape[0]
        if num_rows >= _MIN_ROWS:
            return self._multiply(x)
        return self._multiply(torch.cat((x, x, x, x) if num_rows == 1 else (x, x)))[:num_rows]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


def activate(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    return F.silu(x) if gate == "silu" else F.gelu(x, approximate="tanh")


def _can_pack(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and torch._C._has_mkldnn
