"""What a decoder looks like: sizes, rotary angles, windows and softcaps, read from a Hugging Face `config.json`.

Knows the spelling of every supported family in transformers 4 and 5, and refuses what it does not know rather than
guess. Knows nothing of tensors or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsde.core.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text")

# Google's Gemma 3 files leave out whatever equals the default of transformers; the others are always written out.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}


@dataclass(frozen=True, slots=True)
class Rope:
    """How a position becomes angles. The fields after `factor` are read only by the scaling that names them."""

    theta: float
    scaling: str = "none"
    """none, linear, llama3 or yarn"""
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """yarn: cos and sin are multiplied by it"""
    truncate: bool = True
    """yarn: the ramp begins and ends at whole dimensions"""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder's architecture."""

    family: str
    """llama, mistral, qwen2, qwen3, gemma2 or gemma3"""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    local_rope: Rope | None
    """what layers with a window use instead of `rope` (Gemma 3)"""
    layer_windows: tuple[int | None, ...]
    """per layer, how many tokens a query sees, itself included; None: all"""
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    hidden_activation: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype

    @property
    def is_gemma(self) -> bool:
        return self.family.startswith("gemma")

    def kv_bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * (dtype or self.dtype).itemsize

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json`."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}.")
        if "text_config" in raw:
            outer = {k: raw[k] for k in ("eos_token_id", "bos_token_id", "dtype", "torch_dtype") if raw.get(k)}
            raw = {**raw["text_config"], **outer}
        if family == "gemma3_text":
            family = "gemma3"
        if family == "gemma3":
            raw = {**_GEMMA3_DEFAULTS, **raw}
        if raw.get("use_bidirectional_attention"):
            raise ModelError("use_bidirectional_attention is set: this is an embedding model, not a decoder.")
        return _read(family, raw)


def _read(family: str, raw: Mapping[str, Any]) -> ModelConfig:
    is_gemma = family.startswith("gemma")
    num_heads = int(_need(raw, "num_attention_heads"))
    head_dim = int(raw.get("head_dim") or _need(raw, "hidden_size") // num_heads)
    attention_bias = bool(raw.get("attention_bias"))
    rope, local_rope = _ropes(family, raw)
    return ModelConfig(
        family=family,
        vocab_size=int(_need(raw, "vocab_size")),
        hidden_size=int(_need(raw, "hidden_size")),
        intermediate_size=int(_need(raw, "intermediate_size")),
        num_layers=int(_need(raw, "num_hidden_layers")),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        rms_norm_eps=float(_need(raw, "rms_norm_eps")),
        rope=rope,
        local_rope=local_rope,
        layer_windows=_layer_windows(family, raw),
        max_position_embeddings=int(_need(raw, "max_position_embeddings")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", is_gemma)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias")),
        qk_norm=family in ("qwen3", "gemma3"),
        attention_scale=float(_need(raw, "query_pre_attn_scalar") if is_gemma else head_dim) ** -0.5,
        attention_softcap=_optional_float(raw.get("attn_logit_softcapping")),
        final_softcap=_optional_float(raw.get("final_logit_softcapping")),
        hidden_activation=_activation(is_gemma, raw),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
        dtype=_dtype(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` as it is found in the wild: missing, one id, or a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ModelError(f"config.json has no {key!r}, which a {raw.get('model_type')} model needs.")
    return raw[key]


def _optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _dtype(name: str | torch.dtype) -> torch.dtype:
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"config.json names the dtype {name!r}, which torch does not know.")
    return dtype


def _activation(is_gemma: bool, raw: Mapping[str, Any]) -> str:
    allowed = "gelu_pytorch_tanh" if is_gemma else "silu"
    # Gemma 2 files carry both keys, and `hidden_act` may be a wrong leftover.
    name = raw.get("hidden_activation") or raw.get("hidden_act") or allowed
    if name != allowed:
        raise ModelError(f"the activation {name!r} is not supported for {raw.get('model_type')}; only {allowed!r} is.")
    return allowed


def _layer_windows(family: str, raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers = int(_need(raw, "num_hidden_layers"))
    window = raw.get("sliding_window")
    if family == "llama" or (family.startswith("qwen") and not raw.get("use_sliding_window")):
        window = None
    if window is None:
        return (None,) * num_layers
    types = raw.get("layer_types")
    if types:
        slides = [kind == "sliding_attention" for kind in types]
    elif family == "mistral":
        slides = [True] * num_layers
    elif family.startswith("qwen"):
        slides = [i >= int(_need(raw, "max_window_layers")) for i in range(num_layers)]
    else:
        default = 2 if family == "gemma2" else 6
        pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or default
        slides = [(i + 1) % pattern != 0 for i in range(num_layers)]
    if len(slides) != num_layers:
        raise ModelError(f"config.json lists {len(slides)} layer_types for {num_layers} layers.")
    return tuple(int(window) if slide else None for slide in slides)


def _ropes(family: str, raw: Mapping[str, Any]) -> tuple[Rope, Rope | None]:
    """The rotary embedding of full layers, and of windowed layers where theirs is different."""
    new = raw.get("rope_parameters")
    if new and "full_attention" in new:
        return _rope(new["full_attention"], raw), _rope(new["sliding_attention"], raw)
    # Before Llama 3, files could leave rope_theta out and mean 10000.
    scaling = {"rope_theta": raw.get("rope_theta", 10000.0), **(new or raw.get("rope_scaling") or {})}
    local = Rope(theta=float(raw.get("rope_local_base_freq", 10000.0))) if family == "gemma3" else None
    return _rope(scaling, raw), local


def _rope(scaling: Mapping[str, Any], raw: Mapping[str, Any]) -> Rope:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(scaling["rope_theta"])
    if (scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported; every head dimension must be rotated.")
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"rope scaling {kind!r} is not supported; supported are default, linear, llama3 and yarn.")
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    limit = int(_need(raw, "max_position_embeddings"))
    factor = float(scaling.get("factor") or limit / (original or limit))
    return Rope(
        theta=theta,
        scaling=kind,
        factor=factor,
        original_max_position=int(original or limit),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN (arXiv 2309.00071), end of section 3.4, with DeepSeek's mscale pair where a file gives it."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(float(scaling["mscale"])) / mscale(float(scaling["mscale_all_dim"]))
    return mscale(1.0)
