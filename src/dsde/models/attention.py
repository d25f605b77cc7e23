"""Paged attention over a ragged batch in plain PyTorch: the CPU path, and the reference for every kernel.

Short queries (decoding, verifying) of sequences with similar contexts are padded to one call; a long query (prefill)
gets calls of its own, cut so that masks and scores stay small. Which sequence goes where is planned once per batch, in
`batch.plan`, so that a layer only gathers and multiplies. Knows nothing of models; runs on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dsde.models.batch import BLOCK_SIZE, PackedBatch

SHORT_QUERY = 16
"""Queries up to this long share a call with others."""
MAX_SCORES = 1 << 20
"""A long query is cut so that its length times its context stays below this."""
MAX_GATHERED_BLOCKS = 2048
"""One call copies at most this many blocks of keys (unless a single sequence has more)."""
FREE_PADDING_BLOCKS = 8
"""Padding by this many blocks costs less than another call."""
MAX_PADDING = 0.25


class Piece(NamedTuple):
    """Consecutive new tokens of one sequence, and the blocks they can see."""

    seq: int
    row: int
    """row of its first token in the batch"""
    query_len: int
    position: int
    """position of its first token"""
    first_block: int
    num_blocks: int


@dataclass(slots=True)
class Group:
    """Pieces that one call answers, padded to one query length and one number of blocks."""

    rows: torch.Tensor | None
    """[num_pieces * query_len] rows of the queries, padding repeats a piece's last; None: every row, in order"""
    blocks: torch.Tensor
    """[num_pieces * num_blocks] blocks of keys and values to gather"""
    mask: torch.Tensor | None
    """additive; [num_pieces, 1, heads_per_kv * query_len, context] short, [query_len, context] long; None: causal"""
    num_pieces: int
    is_long: bool
    context_len: int
    """of a long group; a short one is masked instead of cut"""


@dataclass(slots=True)
class Plan:
    """Everything about a batch's attention that is the same in all layers with the same window."""

    groups: list[Group]
    order: torch.Tensor | None
    """where each row of the batch is found in the groups' results laid end to end; None: already in order"""


def write_kv(
    cache_k: torch.Tensor, cache_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store keys and values [num_tokens, num_kv_heads, head_dim] in their slots."""
    cache_k.index_copy_(0, slots, k)
    cache_v.index_copy_(0, slots, v)


def paged_attention(
    q: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    batch: PackedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend from q [num_tokens, num_heads, head_dim] to the cache, the batch's own keys already written."""
    if batch.plan is None:
        batch.plan = {}
    # is_causal cannot be combined with a softcap, and masks are laid out for one head grouping and dtype.
    key = (window, softcap is None, q.shape[1] // cache_k.shape[1], q.dtype)
    plan: Plan | None = batch.plan.get(key)
    if plan is None:
        plan = batch.plan[key] = make_plan(batch, window, softcap is None, q.shape[1] // cache_k.shape[1], q.dtype)
    results = [
        (_attend_long if group.is_long else _attend_short)(
            q if group.rows is None else q.index_select(0, group.rows), cache_k, cache_v, group, scale, softcap
        )
        for group in plan.groups
    ]
    if plan.order is None:
        return results[0]
    return torch.cat(results).index_select(0, plan.order)


def _attend_short(
    q: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, group: Group, scale: float, softcap: float | None
) -> torch.Tensor:
    # The query heads that share a KV head become further query rows, so that keys are not repeated.
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache_k.shape[1]
    q = q.reshape(group.num_pieces, -1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    folded = q.permute(0, 2, 3, 1, 4).reshape(group.num_pieces, num_kv_heads, -1, head_dim)
    keys = _gather(cache_k, group).transpose(1, 2)
    values = _gather(cache_v, group).transpose(1, 2)
    out = _attend(folded, keys, values, group.mask, scale, softcap)
    out = out.view(group.num_pieces, num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)


def _attend_long(
    q: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, group: Group, scale: float, softcap: float | None
) -> torch.Tensor:
    # KV heads take the place of the batch: the heads that share one then read it by a stride of zero.
    query_len, num_heads, head_dim = q.shape
    num_kv_heads = cache_k.shape[1]
    per_kv = num_heads // num_kv_heads
    keys = _gather(cache_k, group)[0, : group.context_len].transpose(0, 1).unsqueeze(1).expand(-1, per_kv, -1, -1)
    values = _gather(cache_v, group)[0, : group.context_len].transpose(0, 1).unsqueeze(1).expand(-1, per_kv, -1, -1)
    heads = q.view(query_len, num_kv_heads, per_kv, head_dim).permute(1, 2, 0, 3)
    out = _attend(heads, keys, values, group.mask, scale, softcap)
    return out.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)


def _gather(cache: torch.Tensor, group: Group) -> torch.Tensor:
    """[num_pieces, context, num_kv_heads, head_dim]"""
    _, num_kv_heads, head_dim = cache.shape
    blocks = cache.view(-1, BLOCK_SIZE * num_kv_heads * head_dim).index_select(0, group.blocks)
    return blocks.view(group.num_pieces, -1, num_kv_heads, head_dim)


def make_plan(
    batch: PackedBatch, window: int | None, allow_causal: bool, heads_per_kv: int, dtype: torch.dtype
) -> Plan:
    """Cut the batch into groups. `allow_causal` lets a first chunk go without a mask."""
    short, long = _cut(batch, window, allow_causal and window is None)
    groups, rows = [], []
    for pieces in _by_context(short):
        group, group_rows = _short_group(batch, pieces, window, heads_per_kv, dtype)
        groups.append(group)
        rows.append(group_rows)
    for piece in long:
        groups.append(_long_group(batch, piece, window, allow_causal, dtype))
        rows.append(np.arange(piece.row, piece.row + piece.query_len))
    order = np.concatenate(rows)
    in_order = np.arange(len(batch.tokens))
    if len(groups) == 1 and np.array_equal(order, in_order):
        groups[0].rows = None
        return Plan(groups, None)
    found = np.empty(len(in_order), dtype=np.int64)
    found[order] = np.arange(len(order))
    return Plan(groups, torch.from_numpy(found).to(batch.tokens.device))


def _cut(batch: PackedBatch, window: int | None, is_causal: bool) -> tuple[list[Piece], list[Piece]]:
    """Short queries as they are; long ones in pieces, except a first chunk that needs no mask."""
    short: list[Piece] = []
    long: list[Piece] = []
    row = 0
    for seq, (query_len, context) in enumerate(
        zip(batch.query_lens.tolist(), batch.context_lens.tolist(), strict=True)
    ):
        start = context - query_len
        step = query_len
        if query_len > SHORT_QUERY and not (is_causal and start == 0):
            step = max(SHORT_QUERY, MAX_SCORES // min(context, (window or context) + query_len))
        for position in range(start, context, step):
            length = min(step, context - position)
            first_block = 0 if window is None else max(0, position - window + 1) // BLOCK_SIZE
            num_blocks = -(-(position + length) // BLOCK_SIZE) - first_block
            piece = Piece(seq, row, length, position, first_block, num_blocks)
            (short if query_len <= SHORT_QUERY else long).append(piece)
            row += length
    return short, long


def _by_context(pieces: list[Piece]) -> list[list[Piece]]:
    """Longest contexts first, a new group wherever padding would cost more than another call."""
    groups: list[list[Piece]] = []
    used = padding = 0
    for piece in sorted(pieces, key=lambda piece: -piece.num_blocks):
        longest = groups[-1][0].num_blocks if groups else 0
        padding += longest - piece.num_blocks
        used += piece.num_blocks
        too_wasteful = padding > max(FREE_PADDING_BLOCKS, MAX_PADDING * used)
        if not groups or too_wasteful or padding + used > MAX_GATHERED_BLOCKS:
            groups.append([])
            padding, used = 0, piece.num_blocks
        groups[-1].append(piece)
    return [sorted(group) for group in groups]


def _short_group(
    batch: PackedBatch, pieces: list[Piece], window: int | None, heads_per_kv: int, dtype: torch.dtype
) -> tuple[Group, NDArray[np.int64]]:
    table = np.array(pieces, dtype=np.int64)
    seqs, starts, query_lens, positions, first_blocks, num_blocks = table.T
    offsets = np.minimum(np.arange(query_lens.max()), query_lens[:, None] - 1)
    rows = starts[:, None] + offsets
    mask = _mask(batch, positions[:, None] + offsets, first_blocks, int(num_blocks.max()) * BLOCK_SIZE, window, dtype)
    group = Group(
        rows=torch.from_numpy(rows.ravel()).to(batch.tokens.device),
        blocks=_blocks(batch, seqs, first_blocks, int(num_blocks.max())),
        mask=mask.unsqueeze(1).repeat(1, 1, heads_per_kv, 1),
        num_pieces=len(pieces),
        is_long=False,
        context_len=0,
    )
    return group, rows.ravel()


def _long_group(batch: PackedBatch, piece: Piece, window: int | None, allow_causal: bool, dtype: torch.dtype) -> Group:
    first_block = np.array([piece.first_block])
    context_len = piece.position + piece.query_len - piece.first_block * BLOCK_SIZE
    mask = None
    if not (allow_causal and window is None and piece.position == 0):
        positions = np.arange(piece.position, piece.position + piece.query_len)
        mask = _mask(batch, positions[None], first_block, context_len, window, dtype)[0]
    return Group(
        rows=torch.arange(piece.row, piece.row + piece.query_len, device=batch.tokens.device),
        blocks=_blocks(batch, np.array([piece.seq]), first_block, piece.num_blocks),
        mask=mask,
        num_pieces=1,
        is_long=True,
        context_len=context_len,
    )


def _blocks(
    batch: PackedBatch, seqs: NDArray[np.int64], first_blocks: NDArray[np.int64], num_blocks: int
) -> torch.Tensor:
    """Block ids of every piece, end to end. Past a table's end its last entry is repeated; the mask hides it."""
    columns = np.minimum(first_blocks[:, None] + np.arange(num_blocks), batch.block_tables.shape[1] - 1)
    device = batch.tokens.device
    return batch.block_tables[
        torch.from_numpy(seqs).to(device)[:, None], torch.from_numpy(columns).to(device)
    ].flatten()


def _mask(
    batch: PackedBatch,
    positions: NDArray[np.int64],
    first_blocks: NDArray[np.int64],
    context_len: int,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[num_pieces, query_len, context_len]: 0 where a query at `positions` may look, hugely negative elsewhere."""
    device = batch.tokens.device
    queries = torch.from_numpy(positions - first_blocks[:, None] * BLOCK_SIZE).to(device).unsqueeze(-1)
    keys = torch.arange(context_len, device=device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    # The lowest finite value, not -inf: a stretch of keys that is hidden as a whole would turn into NaN.
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
