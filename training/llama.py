"""A small Llama for sampling and training: weights under fused names, one layer function, any attention.

Knows how to read a target from what `dsde` loads and how to write layers back under Hugging Face names. Knows nothing
of data or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsde.models.gguf import GGUFFile
from dsde.models.gguf_model import gguf_config, gguf_tensors
from dsde.models.tokenizer import Tokenizer

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""queries [rows, tokens, heads, dim], keys and values of the same tokens; gives the mixed values"""

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the weights alone do not say."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float


class Layer(nn.Module):
    """One decoder layer. Weights may be kept in float32 and are used in the dtype of the input."""

    def __init__(self, weights: dict[str, Tensor], shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        for name, weight in weights.items():
            setattr(self, name, nn.Parameter(weight))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        shape, dtype = self.shape, x.dtype
        heads, kv = shape.num_heads, shape.num_kv_heads
        normed = rms_norm(x, self.attention_norm, shape.eps)
        packed = F.linear(normed, self.qkv.to(dtype)).unflatten(-1, (heads + 2 * kv, shape.head_dim))
        rotated = rotate(packed[..., : heads + kv, :], cos, sin)
        mixed = attend(rotated[..., :heads, :], rotated[..., heads:, :], packed[..., heads + kv :, :])
        x = x + F.linear(mixed.flatten(-2), self.output.to(dtype))
        gate, up = F.linear(rms_norm(x, self.mlp_norm, shape.eps), self.gate_up.to(dtype)).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down.to(dtype))

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights under the names of Hugging Face, within the layer."""
        kv = self.shape.num_kv_heads * self.shape.head_dim
        sizes = {"qkv": (self.shape.num_heads * self.shape.head_dim, kv, kv)}
        tensors = {}
        for fused, names in _FUSED.items():
            weight = getattr(self, fused).detach()
            parts = weight.split(sizes.get(fused, weight.shape[0] // len(names)))
            tensors |= {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}
        return tensors


class Llama(nn.Module):
    """Embedding, layers and final norm. The head is the embedding, or some rows of it: the caller's business."""

    def __init__(self, embedding: Tensor, layers: Sequence[Layer], norm: Tensor, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("embedding", embedding)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.Parameter(norm)
        self.register_buffer("frequencies", _frequencies(shape, embedding.device))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.frequencies
        return angles.cos().to(dtype)[..., None, :], angles.sin().to(dtype)[..., None, :]

    def forward(self, tokens: Tensor) -> Tensor:
        """Normed hidden states [rows, tokens, size] of sequences that all begin at position 0."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.angles(torch.arange(tokens.shape[1], device=tokens.device), x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, causal)
        return rms_norm(x, self.norm, self.shape.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def logits(hidden: Tensor, rows: Tensor) -> Tensor:
    """Float32 scores [tokens, rows]. Rounding them to bfloat16 would make ties, and greedy text would drift."""
    if hidden.dtype is torch.bfloat16 and hidden.is_cuda:
        return torch.mm(hidden, rows.T, out_dtype=torch.float32)
    return F.linear(hidden, rows).float()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees itself and what lies before it. Padding on the right needs no mask."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def load_target(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[Llama, Tokenizer, dict[str, Any]]:
    """A target from a GGUF file, its tokenizer, and its `config.json`."""
    file = GGUFFile(path)
    config = gguf_config(file)
    return build(config, gguf_tensors(file), dtype, device), Tokenizer.from_gguf(file.meta, path), config


def build(config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Llama:
    """A model from tensors under their Hugging Face names."""
    shape = Shape(
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["rms_norm_eps"],
        config["rope_theta"],
    )

    def take(name: str) -> Tensor:
        return tensors[name].to(device, dtype)

    layers = []
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        weights = {
            fused: torch.cat([take(f"{prefix}{name}.weight") for name in names]) for fused, names in _FUSED.items()
        }
        layers.append(Layer(weights, shape))
    return Llama(take("model.embed_tokens.weight"), layers, take("model.norm.weight"), shape)


def draft_from(target: Llama, layers: Sequence[int]) -> Llama:
    """A trainable float32 model of some of the target's layers; the embedding is shared and keeps its dtype."""
    copies = [
        Layer({name: weight.detach().float().clone() for name, weight in target.layers[index].named_parameters()},
              target.shape)
        for index in layers
    ]  # fmt: skip
    return Llama(target.embedding, copies, target.norm.detach().float().clone(), target.shape)


def _frequencies(shape: Shape, device: torch.device) -> Tensor:
    exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    return shape.theta**-exponents
