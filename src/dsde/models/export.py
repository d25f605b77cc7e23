"""Writes the embedded pair as ordinary Hugging Face folders, for transformers, vLLM and whoever else reads them.

The draft gets its full vocabulary back: its head is tied to the embedding, of which dsde uses only the rows of the
tokens it can propose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dsde.core.errors import ModelError
from dsde.models.embedded import DRAFT_FOLDER, ensure_embedded_target
from dsde.models.gguf import GGUFFile
from dsde.models.gguf_model import gguf_config, gguf_tensors
from dsde.models.tokenizer import Tokenizer
from dsde.models.weights import TRIMMED_VOCAB, load_safetensors

EMBEDDING = "model.embed_tokens.weight"


def export_pair(folder: Path) -> tuple[Path, Path]:
    """Write `target` and `draft` below `folder`, in float32: the target's weights do not fit bfloat16 exactly."""
    file = GGUFFile(ensure_embedded_target())
    tokenizer = Tokenizer.from_gguf(file.meta, file.path)
    config, tensors = gguf_config(file), gguf_tensors(file)
    _write(folder / "target", config, tensors, tokenizer)
    _write(folder / "draft", *full_embedded_draft(tensors[EMBEDDING]), tokenizer)
    return folder / "target", folder / "draft"


def full_embedded_draft(embedding: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The `config.json` and the tensors of the embedded draft with the whole vocabulary of its target."""
    config = json.loads((DRAFT_FOLDER / "config.json").read_text(encoding="utf-8"))
    config.pop("dsde_draft", None)
    tensors = load_safetensors(DRAFT_FOLDER) | {EMBEDDING: embedding}
    del tensors[TRIMMED_VOCAB]
    return config, tensors


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    complete = config | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "dtype": "float32"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")
        weights = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(folder)
    except OSError as error:
        raise ModelError(f"The models cannot be written to {folder}: {error.strerror}.") from None
