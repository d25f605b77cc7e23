"""A draft as a folder: its weights, the tokens of its head, a Llama `config.json`. The embedding is the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.llama import Llama, build

VOCAB_NAME = "draft_vocab"


def write_draft(folder: Path, draft: Llama, vocab: Tensor, config: dict[str, Any], about: dict[str, Any]) -> None:
    """`vocab` lists token ids, the most frequent first; row i of the head is the embedding of the i-th of them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.layers.{index}.{name}": tensor
        for index, layer in enumerate(draft.layers)
        for name, tensor in layer.named_tensors().items()
    }
    tensors["model.norm.weight"] = draft.norm.detach()
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    tensors[VOCAB_NAME] = vocab.to("cpu", torch.int32).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = config | {"num_hidden_layers": len(draft.layers), "dsde_draft": about}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def read_draft(folder: Path, embedding: Tensor) -> tuple[Llama, Tensor]:
    """The draft in the dtype and on the device of the target's embedding, and its vocabulary."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    vocab = tensors.pop(VOCAB_NAME).long()
    tensors["model.embed_tokens.weight"] = embedding
    return build(config, tensors, embedding.dtype, embedding.device), vocab
