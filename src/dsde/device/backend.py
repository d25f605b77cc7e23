"""Whether a device has kernels of our own. Knows nothing of what they compute."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

_OLDEST = (8, 0)
"""Compute capability: bfloat16 products and asynchronous copies begin with it."""


@cache
def has_kernels(device: torch.device) -> bool:
    """Triton kernels run on CUDA devices, and anywhere in Triton's interpreter, which is slow and meant for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _OLDEST
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
