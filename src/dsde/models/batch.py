"""What one forward pass is given: packed ragged tokens, and the paged KV cache they read and write.

Knows nothing of requests, policies or sampling. Sequences lie one after another without padding; each brings
`query_lens[i]` new tokens whose last one sees `context_lens[i]` tokens of context, itself included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK_SIZE = 16
"""Tokens a KV block holds."""


@dataclass(slots=True)
class PackedBatch:
    """New tokens of several sequences, end to end. Built by `pack`; read-only for the model."""

    tokens: torch.Tensor
    """[num_tokens] int64"""
    positions: torch.Tensor
    """[num_tokens] int64, position of each token in its sequence"""
    slots: torch.Tensor
    """[num_tokens] int64, where the token's KV is written: block * BLOCK_SIZE + offset"""
    query_lens: NDArray[np.int64]
    """[num_seqs] new tokens of each sequence, all >= 1"""
    context_lens: NDArray[np.int64]
    """[num_seqs] tokens that the sequence's last new token sees, itself included"""
    block_tables: torch.Tensor
    """[num_seqs, max_blocks] int64, padded with 0"""
    logit_rows: torch.Tensor | None
    """rows (indices into tokens) whose logits are wanted; None: all of them; empty: none"""
    plan: Any = field(default=None)
    """Written by the attention backend on first use, so that masks and indices are made once and not per layer."""


def pack(
    tokens: NDArray[np.int64],
    query_lens: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    block_tables: Sequence[Sequence[int]],
    logit_rows: NDArray[np.int64] | None,
    device: torch.device,
) -> PackedBatch:
    """Lay out a ragged batch: positions and KV slots follow from the lengths and the block tables."""
    num_seqs = len(query_lens)
    width = max(len(table) for table in block_tables)
    tables = np.zeros((num_seqs, width), dtype=np.int64)
    for row, table in zip(tables, block_tables, strict=True):
        row[: len(table)] = table
    ends = np.cumsum(query_lens)
    rows = np.repeat(np.arange(num_seqs), query_lens)
    positions = np.arange(len(tokens)) + np.repeat(context_lens - ends, query_lens)
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def to_device(array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return PackedBatch(
        tokens=to_device(tokens),
        positions=to_device(positions),
        slots=to_device(slots),
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=to_device(tables),
        logit_rows=None if logit_rows is None else to_device(logit_rows),
    )


@dataclass(slots=True)
class KVCache:
    """Keys and values of every layer of one model, in blocks. Block ids mean the same in target and draft."""

    keys: list[torch.Tensor]
    """per layer [num_blocks * BLOCK_SIZE, num_kv_heads, head_dim]"""
    values: list[torch.Tensor]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        # Zeros, not empty: masked positions are multiplied by zero, and zero times a stray NaN is a NaN.
        shape = (num_blocks * BLOCK_SIZE, num_kv_heads, head_dim)
        return cls(
            keys=[torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)],
            values=[torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)],
        )
