"""How kernels are launched: whether one may start before the kernel ahead of it has finished.

With programmatic dependent launch a kernel's blocks become resident while the previous kernel drains; they may touch
weights at once and wait on the device before they touch anything another kernel writes. Knows no kernel.
"""

from __future__ import annotations

import functools

import torch
import triton

_FIRST_CAPABILITY = (9, 0)
"""Hopper is the first architecture with grid dependency control."""


def programmatic_launch() -> bool:
    """Whether kernels on the current device are launched before their predecessors are done."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return _has_dependency_control(torch.cuda.current_device())


@functools.cache
def _has_dependency_control(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
