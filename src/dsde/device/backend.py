"""Whether a device has kernels of our own, and how to be on it. Knows nothing of what they compute."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

_OLDEST = (8, 0)
"""Compute capability: bfloat16 products and asynchronous copies begin with it."""


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and not why_no_kernels(device)


@cache
def why_no_kernels(device: torch.device) -> str:
    """One sentence for a CUDA device that has none; empty if it has."""
    if torch.version.cuda is None:
        return "The kernels are for NVIDIA GPUs, and this torch was built for others."
    if importlib.util.find_spec("triton") is None:
        return "The kernels need Triton, which is not installed."
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return f"The kernels need compute capability 8.0, and {torch.cuda.get_device_name(device)} has {capability}."
    return ""


def device_context(device: torch.device) -> AbstractContextManager[None]:
    """Within it, this device is the thread's current one."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[None] = torch.cuda.device(device)
    return context


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
