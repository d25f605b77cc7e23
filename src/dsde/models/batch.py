"""What one forward pass is given: packed ragged tokens, and the paged KV cache they read and write.

Knows nothing of requests, policies or sampling. Sequences lie one after another without padding; each brings
`query_lens[i]` new tokens whose last one sees `context_lens[i]` tokens of context, itself included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.device import backend

if TYPE_CHECKING:
    from dsde.models.kernels.attention import AttentionWork

BLOCK_SIZE = 16
"""Tokens a KV block holds."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of every token of a batch, [num_tokens, 1, head_dim] each; the first half of sin is negated"""


@dataclass(slots=True)
class PackedBatch:
    """New tokens of several sequences, end to end. Read-only for the model.

    Built by `pack`, or over staged buffers by a `Pass`, which knows lengths and tables on the device only.
    """

    tokens: torch.Tensor
    """[num_tokens] integer"""
    positions: torch.Tensor
    """[num_tokens] integer, position of each token in its sequence"""
    slots: torch.Tensor
    """[num_tokens] integer, where the token's KV is written: block * BLOCK_SIZE + offset; negative: nowhere"""
    logit_rows: torch.Tensor | None
    """rows (indices into tokens) whose logits are wanted; None: all of them; empty: none"""
    work: AttentionWork | None = None
    """for attention by kernel; None: in plain PyTorch, which needs the three that follow"""
    query_lens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[num_seqs] new tokens of each sequence, all >= 1"""
    context_lens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[num_seqs] tokens that the sequence's last new token sees, itself included"""
    block_tables: torch.Tensor = field(default_factory=lambda: torch.empty((0, 0), dtype=torch.int64))
    """[num_seqs, max_blocks] int64, padded with 0"""
    sources: torch.Tensor | None = None
    """[num_tokens] where in `drafted` a token is found; negative: it is the one in `tokens`. None: all are there"""
    drafted: torch.Tensor | None = None
    """tokens that only the device knows"""
    plan: Any = field(default=None)
    """Written by plain attention on first use, so that masks and indices are made once and not per layer."""
    rotations: dict[Any, Rotation] = field(default_factory=dict)
    """likewise, by rotary embedding"""


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


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention by kernel must know of a model to cut its work."""

    per_kv: int
    """query heads that share a key head"""
    num_kv: int
    head_dim: int
    dtype: torch.dtype

    def attention_work(self, batch: PackedBatch) -> AttentionWork:
        """The work of a packed batch. A `Pass` makes its own, over staged buffers."""
        from dsde.models.kernels import attention

        device = batch.tokens.device
        longest = int(batch.query_lens.max())
        per_item = attention.queries_per_item(longest, self.per_kv, self.head_dim, self.dtype)
        items = attention.make_items(batch.query_lens, per_item)
        context = int(batch.context_lens.max())

        def to_device(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        return attention.AttentionWork(
            starts=to_device(np.concatenate(([0], np.cumsum(batch.query_lens)))),
            contexts=to_device(batch.context_lens),
            tables=batch.block_tables.flatten().int(),
            table_offsets=to_device(np.arange(len(batch.query_lens)) * batch.block_tables.shape[1]),
            items=to_device(items),
            queries_per_item=per_item,
            num_splits=self.num_splits(len(items), context, longest, device),
        )

    def num_splits(self, num_items: int, longest_context: int, longest_query: int, device: torch.device) -> int:
        from dsde.models.kernels import attention

        multiprocessors = backend.num_multiprocessors(device)
        return attention.choose_splits(num_items, self.num_kv, longest_context, multiprocessors, longest_query)


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
