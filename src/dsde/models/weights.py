"""From named tensors to a model: safetensors folders, Hugging Face tensor names, fused projections.

The only place that knows how checkpoints name things. Knows nothing of downloading or of GGUF; a GGUF reader hands its
tensors to `build_model` under the same names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dsde.core.errors import ModelError
from dsde.models.config import ModelConfig
from dsde.models.decoder import Decoder, Layer
from dsde.models.gemma import GemmaLayer
from dsde.models.layers import GatedMLP, Rotary, SelfAttention
from dsde.models.linear import Linear
from dsde.models.llama import LlamaLayer
from dsde.models.norm import RMSNorm

TRIMMED_VOCAB = "draft_vocab"
"""Names the tensor of token ids that a draft with a trimmed vocabulary can propose; its head shares the embedding."""


def load_safetensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of `model.safetensors`, or of the files its index lists."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if not (folder / name).exists():
            raise ModelError(f"{folder} has no {name}; the folder is not a model or its download is incomplete.")
        try:
            tensors.update(load_file(folder / name))
        except SafetensorError as error:
            raise ModelError(f"{folder / name} is damaged ({error}); fetch it again.") from error
    return tensors


def build_model(
    config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Decoder:
    """A decoder from tensors under their Hugging Face names. Empties `tensors`, so that memory is not held twice."""
    device = torch.device(device)
    _check_room(tensors, dtype, device)
    source = _Source(config, tensors, dtype, device)
    embedding = source.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    make_layer = source.gemma_layer if config.is_gemma else source.llama_layer
    layers: list[Layer] = [make_layer(index) for index in range(config.num_layers)]
    norm = source.norm("model.norm.weight")
    head, head_tokens = embedding, None
    if TRIMMED_VOCAB in tensors:
        head_tokens = tensors.pop(TRIMMED_VOCAB).to(device=device, dtype=torch.int64)
        head = embedding[head_tokens]
    elif not config.tie_word_embeddings:
        head = source.take("lm_head.weight", config.vocab_size, config.hidden_size)
    source.finish()

    def rotary(rope: Any) -> Rotary:
        return Rotary(rope, config.head_dim, config.max_position_embeddings, dtype, device)

    return Decoder(
        config=config,
        embedding=embedding,
        embedding_scale=config.hidden_size**0.5 if config.is_gemma else 1.0,
        rotary=rotary(config.rope),
        local_rotary=None if config.local_rope is None else rotary(config.local_rope),
        layers=layers,
        norm=norm,
        head=Linear(head),
        head_tokens=head_tokens,
    )


class _Source:
    """Takes tensors out of a checkpoint, checked, converted and fused."""

    def __init__(
        self, config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        for name in list(tensors):
            tensors[_text_name(name)] = tensors.pop(name)
        self.config = config
        self.tensors = tensors
        self.dtype = dtype
        self.device = device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"the checkpoint has no tensor {name}, which a {self.config.family} model needs.")
        if tensor.shape != shape:
            raise ModelError(f"the tensor {name} has shape {tuple(tensor.shape)}, but the config asks for {shape}.")
        return tensor.to(device=self.device, dtype=self.dtype)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._norm_weight(name, self.config.hidden_size), self.config.rms_norm_eps)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        weight = self.take(name, size)
        # Gemma multiplies by 1 + weight in float32; the sum would not survive a rounding to bfloat16.
        return weight.float() + 1.0 if self.config.is_gemma else weight

    def linear(self, prefix: str, parts: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """One projection out of several that read the same input."""
        weights = [self.take(f"{prefix}{name}.weight", size, inputs) for name, size in parts.items()]
        bias = (
            torch.cat([self.take(f"{prefix}{name}.bias", size) for name, size in parts.items()]) if has_bias else None
        )
        return Linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

    def attention(self, prefix: str, index: int) -> SelfAttention:
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        prefix += "self_attn."
        qk_norm = None
        if config.qk_norm:
            q_weight = self._norm_weight(prefix + "q_norm.weight", config.head_dim)
            k_weight = self._norm_weight(prefix + "k_norm.weight", config.head_dim)
            rows = [q_weight.expand(config.num_heads, -1), k_weight.expand(config.num_kv_heads, -1)]
            qk_norm = RMSNorm(torch.cat(rows), config.rms_norm_eps)
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return SelfAttention(
            qkv=self.linear(prefix, qkv, config.hidden_size, config.qkv_bias),
            output=self.linear(prefix, {"o_proj": config.hidden_size}, q_size, config.output_bias),
            qk_norm=qk_norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.layer_windows[index],
            softcap=config.attention_softcap,
        )

    def mlp(self, prefix: str) -> GatedMLP:
        config = self.config
        gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        down = {"down_proj": config.hidden_size}
        return GatedMLP(
            gate_up=self.linear(prefix + "mlp.", gate_up, config.hidden_size, config.mlp_bias),
            down=self.linear(prefix + "mlp.", down, config.intermediate_size, config.mlp_bias),
            gate="gelu_tanh" if config.is_gemma else "silu",
        )

    def llama_layer(self, index: int) -> LlamaLayer:
        prefix = f"model.layers.{index}."
        return LlamaLayer(
            attention_norm=self.norm(prefix + "input_layernorm.weight"),
            attention=self.attention(prefix, index),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            mlp=self.mlp(prefix),
            is_local=self.config.layer_windows[index] is not None,
        )

    def gemma_layer(self, index: int) -> GemmaLayer:
        prefix = f"model.layers.{index}."
        return GemmaLayer(
            attention_norm=self.norm(prefix + "input_layernorm.weight"),
            attention=self.attention(prefix, index),
            post_attention_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            mlp_norm=self.norm(prefix + "pre_feedforward_layernorm.weight"),
            mlp=self.mlp(prefix),
            post_mlp_norm=self.norm(prefix + "post_feedforward_layernorm.weight"),
            is_local=self.config.layer_windows[index] is not None,
        )

    def finish(self) -> None:
        """A tensor of a layer that nothing used means that the layer was understood wrongly."""
        for name in self.tensors:
            if name.startswith("model.layers.") and not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(f"the checkpoint has a tensor {name}, which its config does not account for.")
        self.tensors.clear()


def _check_room(tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda":
        return
    needed = sum(tensor.numel() for tensor in tensors.values() if not tensor.is_cuda) * dtype.itemsize
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"the weights need {needed / 2**30:.1f} GiB in {name}, but of the GPU's {total / 2**30:.1f} GiB "
            f"{free / 2**30:.1f} are free; models of up to {free / dtype.itemsize / 1e9:.1f} billion weights would fit."
        )


def _text_name(name: str) -> str:
    """The name of a text model's tensor, also where the checkpoint holds a vision model beside it (Gemma 3)."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    return name.replace("model.language_model.", "model.", 1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; {path.parent} is not a Hugging Face model folder.") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON ({error}).") from error
    return content
