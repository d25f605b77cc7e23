"""Tiny random models with spread-out logits, and engines over them: real, and quick enough for many requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dsde import RequestOutput, SamplingParams
from dsde.drafting import Drafter, ModelDrafter, NgramDrafter
from dsde.engine.config import EngineConfig
from dsde.engine.engine import Engine
from dsde.models.config import ModelConfig
from dsde.models.decoder import Decoder
from dsde.models.weights import build_model
from dsde.policies import Policy, make_policy
from dsde.sampling import Sampler

DEVICE = torch.device("cpu")


def tiny_tensors(
    vocab: int, seed: int, layers: int = 2, sharpness: float = 1.0, width: int = 32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = (32 / width) ** 0.5

    def random(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    tensors = {
        "model.embed_tokens.weight": random(vocab, width, std=1.0),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": random(vocab, width, std=0.4 * sharpness * scale),
    }
    for i in range(layers):
        name = f"model.layers.{i}."
        for part, rows, columns in (
            ("self_attn.q_proj", width, width),
            ("self_attn.k_proj", width // 2, width),
            ("self_attn.v_proj", width // 2, width),
            ("self_attn.o_proj", width, width),
            ("mlp.gate_proj", width * 3 // 2, width),
            ("mlp.up_proj", width * 3 // 2, width),
            ("mlp.down_proj", width, width * 3 // 2),
        ):
            tensors[f"{name}{part}.weight"] = random(rows, columns, std=0.3 * scale)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{part}.weight"] = torch.ones(width)
    return tensors


def tiny_model(
    vocab: int = 64,
    seed: int = 0,
    layers: int = 2,
    noise: float = 0.0,
    sharpness: float = 1.0,
    max_len: int = 512,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = DEVICE,
) -> Decoder:
    """A random Llama. With `noise`, its weights are those of the same seed, disturbed: a draft for it."""
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": width,
            "intermediate_size": width * 3 // 2,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": max_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "eos_token_id": None,
        }
    )
    tensors = tiny_tensors(vocab, seed, layers, sharpness, width)
    generator = torch.Generator().manual_seed(seed + 1)
    for weight in tensors.values():
        if noise and weight.dim() == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return build_model(config, tensors, dtype, device)


def make_engine(target: Decoder, draft: Decoder | str | None, policy: str | Policy = "off", **settings: Any) -> Engine:
    settings.setdefault("kv_cache_bytes", 16 << 20)
    config = EngineConfig(**settings)
    sampler = Sampler()
    drafter: Drafter | None = None
    if draft == "ngram":
        drafter = NgramDrafter(longest=3, shortest=1, device=target.device)
    elif isinstance(draft, Decoder):
        drafter = ModelDrafter(draft, sampler, target.config.vocab_size, config.tokens_per_pass(target.device))
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    return Engine(target, drafter, chosen, None, sampler, config)


def run(engine: Engine, limit: int = 100_000) -> dict[str, RequestOutput]:
    """Step until everything is done; fails rather than hangs."""
    done: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not engine.has_work:
            return done
        done.update((output.request_id, output) for output in engine.step().finished)
    raise AssertionError(f"not finished after {limit} steps")


def complete(engine: Engine, prompts: Iterable[list[int]], params: SamplingParams) -> list[RequestOutput]:
    ids = [engine.add(prompt, params) for prompt in prompts]
    done = run(engine)
    return [done[request_id] for request_id in ids]
