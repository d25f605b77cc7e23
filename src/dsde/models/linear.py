"""A matrix that rows are multiplied with, in the layout this machine multiplies fastest.

Inference only: holds plain tensors, no parameters and no gradients. Knows nothing of models or names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS_HINT = 8
"""oneDNN lays weights out for about this many rows; 4 to 64 measured alike, 1 is up to 40 % slower."""
_MIN_ROWS = 3
"""oneDNN takes longer for 1 or 2 rows than for 3 or 4, so fewer are repeated, which saves about 15 %."""


class Linear:
    """`x @ weight.T + bias` with weight [out, in]. On CPU in float32 only a packed copy of the weight is kept.

    Packing makes 1 to 5 rows cost the same and 16 half as much again, which is what makes verifying a draft cheap on a
    CPU. As measured, a row's result does not depend on how many rows lie beside it; oneDNN does not promise that.
    """

    __slots__ = ("bias", "is_packed", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.is_packed = _can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if self.is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_packed:
            return F.linear(x, self.weight, self.bias)
        num_rows = x.shape[0]
        if num_rows >= _MIN_ROWS:
            return self._multiply(x)
        return self._multiply(torch.cat((x, x, x, x) if num_rows == 1 else (x, x)))[:num_rows]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


def _can_pack(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and torch._C._has_mkldnn
