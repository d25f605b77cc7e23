"""Target and draft as folders on disk: random, tiny, with a tokenizer and a chat template, as any other pair of files.

Both are loaded as a user would load them, also by transformers. The draft is the target with some noise.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from tiny import tiny_tensors

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NOISE = 0.03


def write_pair(folder: Path) -> tuple[Path, Path]:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the and of to in a is that for it as was with be by on not he"], trainer)
    tensors = tiny_tensors(tokenizer.get_vocab_size(), seed=3)
    generator = torch.Generator().manual_seed(4)
    noisy = {
        name: weight + NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
        if weight.dim() == 2
        else weight
        for name, weight in tensors.items()
    }
    return (
        _write(folder / "target", tokenizer, tensors),
        _write(folder / "draft", tokenizer, noisy),
    )


def _write(folder: Path, tokenizer: tokenizers.Tokenizer, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
