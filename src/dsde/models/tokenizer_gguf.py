"""Builds a byte-level BPE tokenizer from the metadata of a GGUF file.

Knows how each `tokenizer.ggml.pre` splits text before merging. Knows nothing of files or of chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": [_GPT2_WORDS],
    "smollm": [r"\p{N}", _GPT2_WORDS],
    "qwen2": [_MODERN_WORDS % r"\p{N}"],
    "llama-bpe": [_MODERN_WORDS % r"\p{N}{1,3}"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"],
}


def can_build(meta: Mapping[str, Any]) -> bool:
    """Whether the metadata describes a tokenizer of a kind known here."""
    return meta.get("tokenizer.ggml.model") == "gpt2" and _pre(meta) in _SPLITS and "tokenizer.ggml.merges" in meta


def build(meta: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes; call only where `can_build` says so."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    # Unused entries only pad the embedding; with them left out, padding does not make two tokenizers differ.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    merges = [_pair(merge) for merge in meta["tokenizer.ggml.merges"]]
    pre = _pre(meta)
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    if meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = meta["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$bos $A".replace("$bos", tokens[bos]), special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pre(meta: Mapping[str, Any]) -> str:
    return str(meta.get("tokenizer.ggml.pre", "default"))


def _pair(merge: str) -> tuple[str, str]:
    # A byte-level token never holds a plain space, but one may begin the second part in hand-made files.
    left, right = merge.split(" ", 1)
    return left, right
