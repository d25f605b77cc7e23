"""Drafts made out of a target: fewer layers, noisier weights, coarser weights.

For tests, and for targets that have no trained draft. The transforms take and return named tensors, before a model is
built from them; only `skip_layers` works on a model, and shares its memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from dsde.core.errors import ModelError
from dsde.models.decoder import Decoder

ROUNDING_BLOCK = 32
"""Input values that share one scale and one minimum."""


def skip_layers(model: Decoder, first: int, last: int) -> Decoder:
    """The same model without layers first..last, both left out; all weights are shared."""
    num_layers = model.config.num_layers
    if not 0 <= first <= last < num_layers:
        raise ModelError(f"cannot leave out layers {first} to {last} of a model that has layers 0 to {num_layers - 1}.")
    windows = model.config.layer_windows
    config = replace(
        model.config,
        num_layers=num_layers - (last - first + 1),
        layer_windows=windows[:first] + windows[last + 1 :],
    )
    return replace(model, config=config, layers=[*model.layers[:first], *model.layers[last + 1 :]])


def add_noise(tensors: dict[str, torch.Tensor], std_fraction: float, seed: int) -> dict[str, torch.Tensor]:
    """Add gaussian noise of `std_fraction` of its own standard deviation to every projection."""
    generator = torch.Generator().manual_seed(seed)
    noisy = dict(tensors)
    # Sorted, so that the same seed gives the same draft however the checkpoint was read.
    for name in sorted(tensors):
        weight = tensors[name]
        if _is_projection(name, weight):
            noise = torch.randn(weight.shape, generator=generator).to(weight.device)
            noisy[name] = (weight.float() + noise * weight.float().std() * std_fraction).to(weight.dtype)
    return noisy


def round_to_bits(tensors: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """Round every projection to 2**bits evenly spaced levels between the minimum and maximum of each block."""
    return {n: _round(weight, bits) if _is_projection(n, weight) else weight for n, weight in tensors.items()}


def _is_projection(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and "embed_tokens" not in name


def _round(weight: torch.Tensor, bits: int) -> torch.Tensor:
    num_inputs = weight.shape[1]
    # Repeating the last value fills a last block without changing its minimum and maximum.
    padded = F.pad(weight.float(), (0, -num_inputs % ROUNDING_BLOCK), mode="replicate")
    blocks = padded.view(len(weight), -1, ROUNDING_BLOCK)
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    rounded: torch.Tensor = ((blocks - low) / step).round() * step + low
    return rounded.flatten(1)[:, :num_inputs].to(weight.dtype)
