"""Root-mean-square norm over the last dimension. Knows nothing of where it stands in a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsde.device import backend


class RMSNorm:
    """A weight wider than the input asks for arithmetic in the weight's dtype."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.shape = weight.shape[-1:]
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and self.weight.dim() == 1 and backend.has_kernels(x.device):
            from dsde.models.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        wide = x.to(self.weight.dtype)
        if self.weight.dim() == 1:
            return F.rms_norm(wide, self.shape, self.weight, self.eps).to(x.dtype)
        return (F.rms_norm(wide, self.shape, None, self.eps) * self.weight).to(x.dtype)
