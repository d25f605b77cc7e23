"""From a name to a model that is ready to run: finds it, reads weights and tokenizer, builds the network.

Knows which reader suits which file, and how a draft is named. Knows nothing of formats (see `gguf`, `weights`) or of
what the models are used for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dsde.core.errors import InvalidInput, ModelError
from dsde.models.config import ModelConfig
from dsde.models.decoder import Decoder
from dsde.models.derived import add_noise, round_to_bits, skip_layers
from dsde.models.embedded import DRAFT_FOLDER, ensure_embedded_target
from dsde.models.gguf import GGUFFile
from dsde.models.gguf_model import gguf_config, gguf_tensors
from dsde.models.hub import resolve
from dsde.models.tokenizer import Tokenizer
from dsde.models.weights import build_model, load_safetensors

Tensors = dict[str, torch.Tensor]
Progress = Callable[[str], None]

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_DRAFT_FORMS = "embedded, skip:FIRST-LAST, noise:STD, round:BITS (1 to 8) or a model's name"
_DERIVED = re.compile(r"(skip|noise|round):(.*)")
_NOISE_SEED = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what belongs to it."""

    name: str
    path: Path
    """the folder or GGUF file it was read from"""
    model: Decoder
    tokenizer: Tokenizer | None
    """None where a folder brings no tokenizer: such a model takes and gives token ids only"""


@dataclass(frozen=True, slots=True)
class _Source:
    """A model's files, opened; weights are read when asked for."""

    config: ModelConfig
    tensors: Callable[[], Tensors]
    tokenizer: Callable[[], Tokenizer | None]


def load_model(
    name: str | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = lambda message: None,
) -> LoadedModel:
    """Load a folder, a GGUF file or a hub repository; None: the embedded target, downloaded first if need be.

    dtype None: float32 on a CPU, elsewhere what the model was published in.
    """
    device = _check_device(device)
    path = ensure_embedded_target(progress) if name is None else resolve(name)
    source = _open(path)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else source.config.dtype
    model = build_model(source.config, source.tensors(), dtype, device)
    return LoadedModel(name or EMBEDDED_NAME, path, model, source.tokenizer())


def load_draft(spec: str, target: LoadedModel) -> LoadedModel:
    """Load a draft for `target`, in its dtype and on its device: a model by name, or one derived from the target."""
    if spec == "embedded":
        return LoadedModel(f"{EMBEDDED_NAME} draft", DRAFT_FOLDER, _embedded_draft(target.model), target.tokenizer)
    derived = _DERIVED.fullmatch(spec)
    if derived is None:
        draft = load_model(spec, target.model.dtype, target.model.device)
        _check_same_tokens(draft, target)
        return draft
    model = _derive(derived[1], derived[2], spec, target)
    return LoadedModel(f"{target.name}+{spec}", target.path, model, target.tokenizer)


def _embedded_draft(target: Decoder) -> Decoder:
    """The draft that comes with dsde, on the embedding of the target it was trained for."""
    config = ModelConfig.from_hf(_folder_config(DRAFT_FOLDER))
    if target.embedding.shape != (config.vocab_size, config.hidden_size):
        raise ModelError(f"The embedded draft was trained for {EMBEDDED_NAME} and cannot draft for another target.")
    tensors = load_safetensors(DRAFT_FOLDER) | {"model.embed_tokens.weight": target.embedding}
    return build_model(config, tensors, target.dtype, target.device)


def _derive(kind: str, argument: str, spec: str, target: LoadedModel) -> Decoder:
    transform: Callable[[Tensors], Tensors]
    if kind == "skip":
        first, last = _skipped(argument, spec, target.model.config.num_layers)
        return skip_layers(target.model, first, last)
    if kind == "noise":
        transform = partial(add_noise, std_fraction=_noise_std(argument, spec), seed=_NOISE_SEED)
    else:
        transform = partial(round_to_bits, bits=_rounding_bits(argument, spec))
    source = _open(target.path)
    return build_model(source.config, transform(source.tensors()), target.model.dtype, target.model.device)


def _skipped(argument: str, spec: str, num_layers: int) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", argument)
    if match is None:
        raise _bad_spec(spec)
    first, last = int(match[1]), int(match[2])
    if not first <= last < num_layers:
        raise InvalidInput(f"draft {spec!r} must skip layers in order, and the target's are 0 to {num_layers - 1}.")
    return first, last


def _noise_std(argument: str, spec: str) -> float:
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", argument) is None:
        raise _bad_spec(spec)
    return float(argument)


def _rounding_bits(argument: str, spec: str) -> int:
    if re.fullmatch(r"[1-8]", argument) is None:
        raise _bad_spec(spec)
    return int(argument)


def _bad_spec(spec: str) -> InvalidInput:
    return InvalidInput(f"draft {spec!r} is not understood; write {_DRAFT_FORMS}.")


def _check_same_tokens(draft: LoadedModel, target: LoadedModel) -> None:
    if draft.tokenizer is None or target.tokenizer is None:
        # Nothing to compare: token ids in and out, and the user answers for their meaning.
        return
    if not draft.tokenizer.same_as(target.tokenizer):
        raise ModelError(
            f"The draft {draft.name} has another tokenizer than the target {target.name}; choose a draft of the "
            f"target's own family."
        )


def _check_device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise InvalidInput(f"device {device!r} is not known; use cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device cuda was asked for, but PyTorch sees no CUDA device; use cpu.")
    return device


def _open(path: Path) -> _Source:
    if path.is_dir():
        return _Source(
            config=ModelConfig.from_hf(_folder_config(path)),
            tensors=lambda: load_safetensors(path),
            tokenizer=lambda: Tokenizer.from_folder(path) if (path / "tokenizer.json").is_file() else None,
        )
    file = GGUFFile(path)
    return _Source(
        config=ModelConfig.from_hf(gguf_config(file)),
        tensors=lambda: gguf_tensors(file),
        tokenizer=lambda: Tokenizer.from_gguf(file.meta, path),
    )


def _folder_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path / 'config.json'} is not valid JSON.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path / 'config.json'} is not a JSON object.")
    return config
