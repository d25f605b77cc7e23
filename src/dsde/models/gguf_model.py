"""A GGUF file seen as a Hugging Face model: its `config.json` and its tensors under their Hugging Face names.

Knows what llama.cpp's converter renamed, permuted and shifted, and undoes it. Knows nothing of bytes (see `gguf`)
or of networks.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from dsde.core.errors import ModelError
from dsde.models.gguf import GGUFFile

_MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that the file's metadata and tensor table describe."""
    arch = _architecture(file)
    model_type, class_name = _MODEL_TYPES[arch]
    heads, hidden = _need(file, "attention.head_count"), _need(file, "embedding_length")
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _need(file, "feed_forward_length"),
        "num_hidden_layers": _need(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _get(file, "attention.head_count_kv", heads),
        "head_dim": _get(file, "attention.key_length", hidden // heads),
        "max_position_embeddings": _need(file, "context_length"),
        "rms_norm_eps": _need(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _get(file, "rope.freq_base", 1e6 if arch == "gemma3" else 10000.0),
        "vocab_size": _tensor_rows(file, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "dtype": "bfloat16",
        "hidden_act": "gelu_pytorch_tanh" if arch.startswith("gemma") else "silu",
        "bos_token_id": file.meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.meta.get("tokenizer.ggml.padding_token_id"),
    }
    scaling = _rope_scaling(file, config["head_dim"], config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    if arch.startswith("gemma"):
        config |= _gemma_fields(file, arch, config)
    return config


def gguf_tensors(file: GGUFFile) -> dict[str, torch.Tensor]:
    """All weights as float32 under Hugging Face names, in the layout and convention of Hugging Face."""
    arch = _architecture(file)
    names = {name: _hf_name(file, name, arch) for name in file.tensors if name != _ROPE_FACTORS}
    heads = _need(file, "attention.head_count")
    tensors = {}
    for name, tensor in file.read(names).items():
        hf_name = names[name]
        if arch == "llama" and hf_name.endswith(("q_proj.weight", "q_proj.bias")):
            tensor = _split_rope_pairs(file, tensor, heads)
        elif arch == "llama" and hf_name.endswith(("k_proj.weight", "k_proj.bias")):
            tensor = _split_rope_pairs(file, tensor, _get(file, "attention.head_count_kv", heads))
        elif arch.startswith("gemma") and hf_name.endswith("norm.weight"):
            tensor -= 1
        tensors[hf_name] = tensor
    return tensors


def _architecture(file: GGUFFile) -> str:
    arch = str(file.meta.get("general.architecture"))
    if arch not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise ModelError(f"{file.path} has architecture {arch!r}; the GGUF architectures supported are {known}.")
    return arch


def _get(file: GGUFFile, key: str, default: Any) -> Any:
    return file.meta.get(f"{file.meta['general.architecture']}.{key}", default)


def _need(file: GGUFFile, key: str) -> Any:
    value = _get(file, key, None)
    if not value:
        raise ModelError(f"{file.path} does not say its {key}; take another conversion of this model.")
    if isinstance(value, list):
        raise ModelError(f"{file.path} has a different {key} in every layer, which is not supported.")
    return value


def _tensor_rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelError(f"{file.path} holds no tensor {name}; take another conversion of this model.")
    return file.tensors[name].shape[0]


def _hf_name(file: GGUFFile, name: str, arch: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer_names = _GEMMA_LAYER_NAMES if arch.startswith("gemma") else _LAYER_NAMES
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in layer_names:
        raise ModelError(f"{file.path} holds the tensor {name}, which no supported {arch} model has.")
    return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _split_rope_pairs(file: GGUFFile, tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp puts the two rows that RoPE rotates together side by side, Hugging Face half a head apart."""
    if num_heads < 1 or tensor.shape[0] % (2 * num_heads):
        raise ModelError(f"{file.path} has {tensor.shape[0]} query or key rows, which {num_heads} heads cannot share.")
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = _get(file, "rope.scaling.type", "none")
    if kind != "none":
        scaling = {"rope_type": kind, "factor": _get(file, "rope.scaling.factor", 1.0)}
        original = _get(file, "rope.scaling.original_context_length", None)
        return scaling if original is None else scaling | {"original_max_position_embeddings": original}
    if _ROPE_FACTORS not in file.tensors:
        return None
    factors = file.read([_ROPE_FACTORS])[_ROPE_FACTORS]
    return None if torch.all(factors == 1) else _llama3_scaling(file, factors, head_dim, theta)


def _llama3_scaling(file: GGUFFile, factors: torch.Tensor, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1 files hold their scaling only as per-frequency factors; every release used these constants."""
    factor = round(float(factors.max()), 4)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((8192 / wavelengths - 1.0) / 3.0).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if expected.shape != factors.shape or not torch.allclose(expected.float(), factors, rtol=1e-3):
        raise ModelError(f"{file.path} scales RoPE by factors of its own, which only Llama 3.1's scheme is read from.")
    return scaling


def _gemma_fields(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    # Neither the scale of the query nor which layers slide is in the file; both follow from the release.
    largest = layers == (46 if arch == "gemma2" else 62)
    full_every = 2 if arch == "gemma2" else 6
    kinds = ["full_attention" if (i + 1) % full_every == 0 else "sliding_attention" for i in range(layers)]
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _need(file, "attention.sliding_window"),
        "layer_types": kinds,
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
        "attn_logit_softcapping": _get(file, "attn_logit_softcapping", None),
        "final_logit_softcapping": _get(file, "final_logit_softcapping", None),
    }
    if arch == "gemma3":
        fields["rope_local_base_freq"] = 10000.0
    return fields
