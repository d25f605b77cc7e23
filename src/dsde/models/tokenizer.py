"""Text to token ids and back, over the `tokenizers` library.

Knows vocabularies, special tokens and the chat template. Knows nothing of models; `transformers` is not needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from dsde.core.errors import InvalidInput, ModelError
from dsde.models import tokenizer_gguf
from dsde.models.chat_template import ChatTemplate, Message

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """Encodes, decodes and renders chats for one model."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Sequence[int],
        chat_template: str | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens)
        self.eos_token_ids = frozenset(eos_token_ids)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json` and the files that Hugging Face puts beside it."""
        backend = _read_tokenizer_json(path / "tokenizer.json")
        settings = _read_json(path / "tokenizer_config.json")
        special = {key: text for key in ("bos_token", "eos_token") if (text := _token_text(settings.get(key)))}
        eos = _eos_ids(_read_json(path / "generation_config.json")) or _eos_ids(_read_json(path / "config.json"))
        if not eos and (token_id := backend.token_to_id(special.get("eos_token", ""))) is not None:
            eos = [token_id]
        return cls(backend, eos, _folder_template(path, settings), special)

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any], path: Path) -> Tokenizer:
        """Build the tokenizer that the GGUF file at `path` describes, or take the `tokenizer.json` beside it."""
        if tokenizer_gguf.can_build(meta):
            backend = tokenizer_gguf.build(meta)
        elif (path.parent / "tokenizer.json").is_file():
            backend = _read_tokenizer_json(path.parent / "tokenizer.json")
        else:
            kind = f"{meta.get('tokenizer.ggml.model')}/{meta.get('tokenizer.ggml.pre', 'default')}"
            raise ModelError(
                f"{path.name} has a tokenizer of kind {kind}, which is not built from GGUF; put the model's "
                f"tokenizer.json into {path.parent}."
            )
        tokens = meta.get("tokenizer.ggml.tokens", [])
        ids = {name: meta.get(f"tokenizer.ggml.{name}_id") for name in ("bos_token", "eos_token")}
        special = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
        eos = [meta[f"tokenizer.ggml.{key}"] for key in _EOS_KEYS if f"tokenizer.ggml.{key}" in meta]
        return cls(backend, eos, meta.get("tokenizer.chat_template"), special)

    @property
    def vocab_size(self) -> int:
        """Tokens known here; a model's embedding may be padded to more."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # Unlike `encode` this one lets other threads run meanwhile: it counts where a prompt has a million characters.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder that takes ids one by one."""
        return TextStream(self, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """How the token reads on its own, special tokens included; empty for an id that is only padding."""
        return self.decode([token_id], skip_special_tokens=False)

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token spells one raw byte, as `<0xE2>` does in SentencePiece vocabularies."""
        piece = self._backend.id_to_token(token_id)
        return piece is not None and _BYTE_TOKEN.fullmatch(piece) is not None

    @property
    def can_chat(self) -> bool:
        return self._chat_template is not None

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text; special tokens are in it, so encode it with add_special_tokens=False."""
        return self._template.render(messages, add_generation_prompt)

    def save(self, folder: Path) -> None:
        """Write the files that Hugging Face libraries expect of a tokenizer."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._special_tokens,
        }
        if self._chat_template is not None:
            settings["chat_template"] = self._chat_template
        self._backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        generation = {"eos_token_id": sorted(self.eos_token_ids)}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise InvalidInput("This model has no chat template; give it a plain prompt.")
        return ChatTemplate(self._chat_template, self._special_tokens)

    @cached_property
    def _fingerprint(self) -> str:
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        ordinary = self._backend.get_vocab(with_added_tokens=False)
        pairs = sorted((i, token) for token, i in ordinary.items() if token not in added)
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def fingerprint(self) -> str:
        """A hash of which id each ordinary token has. Added tokens are left out: releases of one family rename
        and append them, and padding grows with the model, while text keeps its ids."""
        return self._fingerprint

    def same_as(self, other: Tokenizer) -> bool:
        """Whether both give ordinary tokens the same ids, so that one model can draft for the other."""
        return self is other or self._fingerprint == other._fingerprint


class TextStream:
    """Turns ids into text as they come. All pieces joined are exactly what `decode` gives for all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # A window over the last ids suffices: one token with text in front tells the decoder that it is mid-text.
        self._window: list[int] = []
        self._num_given = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still cut in two."""
        self._window.append(token_id)
        alone = self._tokenizer.decode([token_id], self._skip)
        # What a run of byte tokens means is known only at its end: one bad byte spoils all of it. Tokens without text,
        # such as skipped special ones, do not end it.
        if not alone or self._tokenizer.is_byte_token(token_id):
            return ""
        text = self._text()
        # The end of an unfinished character decodes to exactly one replacement character.
        # (When the window itself begins inside a character, that one may already be counted as given.)
        piece = self._give(text, max(self._num_given, len(text) - text.endswith(_REPLACEMENT)))
        if self._num_given == len(text):
            self._window, self._num_given = [token_id], len(alone)
        return piece

    def flush(self) -> str:
        """Whatever is left at the end of the stream."""
        text = self._text()
        return self._give(text, len(text))

    def _give(self, text: str, until: int) -> str:
        piece = text[self._num_given : until]
        self._num_given = until
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(f"There is no {path}; put the model's tokenizer.json there.")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer that the tokenizers library can read.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object.")
    return content


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _eos_ids(settings: Mapping[str, Any]) -> list[int]:
    value = settings.get("eos_token_id")
    return [] if value is None else value if isinstance(value, list) else [value]


def _folder_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template
