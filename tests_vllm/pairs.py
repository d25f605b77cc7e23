"""Small pairs of models, made up on the spot, as Hugging Face folders that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import rms_norm

VOCAB_SIZE = 512
HIDDEN, LAYERS, HEADS, FFN = 128, 3, 4, 256


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog", "a b c d e f g", "0123456789"], trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"})
    )


def write_model(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = LAYERS,
    num_heads: int = HEADS,
) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": num_layers,
        "intermediate_size": FFN,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": HIDDEN // num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def random_tensors(seed: int, vocab_size: int = VOCAB_SIZE, sharpness: float = 3.0) -> dict[str, torch.Tensor]:
    """A model whose next token depends on all it has read, and not too evenly."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {
        "model.embed_tokens.weight": draw(vocab_size, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": draw(vocab_size, HIDDEN, scale=sharpness / HIDDEN**0.5),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{name}self_attn.{part}.weight"] = draw(HIDDEN, HIDDEN, scale=1.5 / HIDDEN**0.5)
        tensors[f"{name}mlp.gate_proj.weight"] = draw(FFN, HIDDEN, scale=1.0 / HIDDEN**0.5)
        tensors[f"{name}mlp.up_proj.weight"] = draw(FFN, HIDDEN, scale=1.0 / HIDDEN**0.5)
        tensors[f"{name}mlp.down_proj.weight"] = draw(HIDDEN, FFN, scale=1.0 / FFN**0.5)
        tensors[f"{name}input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{name}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return tensors


def noisy(tensors: dict[str, torch.Tensor], share: float, seed: int = 1) -> dict[str, torch.Tensor]:
    """The same model, each weight off by a part of itself: a draft that is right now and then."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + share * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }


def write_pair(
    folder: Path, noise: float = 0.12, vocab_size: int = VOCAB_SIZE, sharpness: float = 3.0
) -> tuple[str, str]:
    """Target and draft."""
    target = random_tensors(0, vocab_size, sharpness)
    return (
        str(write_model(folder / "target", target, vocab_size)),
        str(write_model(folder / "draft", noisy(target, noise), vocab_size)),
    )


def write_eagle(folder: Path, rest: float = 0.0) -> tuple[str, str]:
    """Target and EAGLE head. The head is the target's first layer; the less the others say, the more often it is right.

    It reads what that layer reads but for the first token, which no head sees, and a trace of the target's hidden
    states. It has a norm neither before its layer nor after: embeddings are of norm 1 already, and the target's last
    norm gives back about the size of what it takes.
    """
    target = random_tensors(0)
    target["model.embed_tokens.weight"] = rms_norm(target["model.embed_tokens.weight"], (HIDDEN,))
    target["model.norm.weight"] *= 1.8
    for layer in range(1, LAYERS):
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            target[f"model.layers.{layer}.{part}.weight"] *= rest
    trace = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.02 / HIDDEN**0.5
    head = {name: tensor for name, tensor in target.items() if name.startswith("model.layers.0.")}
    head = {name.removeprefix("model."): tensor for name, tensor in head.items() if "input_layernorm" not in name}
    head["fc.weight"] = torch.cat((torch.eye(HIDDEN), trace), dim=1)
    return str(write_model(folder / "target", target)), str(write_model(folder / "eagle", head, num_layers=1))
