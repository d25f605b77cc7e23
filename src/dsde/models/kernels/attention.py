"""Paged attention over a ragged batch in Triton: decoding, verification and prefill through one kernel.

The queries are cut into items: a few consecutive queries of one sequence. A program answers one item for one KV head:
the query heads that share the KV head become further rows of the same tile, so keys and values are read once. Where
that gives too few programs, the keys of an item are split among several programs as well, and a second kernel merges
their results. Which item is answered from how many keys is worked out on the device, so that a captured CUDA graph
serves batches of other lengths. Knows nothing of models or of who writes the cache; `dsde.models.attention` is the
reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from dsde.device import backend
from dsde.device.launch import programmatic_launch
from dsde.models.batch import BLOCK_SIZE

MIN_ROWS = 16
"""Rows a tensor core multiplies at least: a tile with fewer costs as much."""
MAX_ROWS = 128
MIN_SPLIT_KEYS = 128
"""A program gets at least this many keys before another one shares the work."""
GOOD_SPLIT_KEYS = 128
"""Below this, more splits of the longest context do not pay for merging them."""
MAX_SPLIT_KEYS = 4096
"""A single long context among many short ones is split so that its programs do not outlast all others by far."""
MAX_SPLITS = 64
PROGRAMS_PER_MULTIPROCESSOR = 2
"""Programs that a multiprocessor needs to keep its memory pipes full."""
ENOUGH_PROGRAMS = 0.9
"""of a multiprocessor, that are not worth splitting: to merge what they find takes longer than they do"""
LEAN_TOKENS = 16
"""Up to so many, products read their rows through the first-level cache, which is what shared memory leaves of it. From
one programmatic launch to the next a multiprocessor is never empty, so that it keeps the division that the greediest
kernel has asked for: 96 KiB here made the products of a whole pass a fifth slower (H200)."""
FEW_TOKENS = 4
"""of which it holds all rows even then"""
LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class AttentionWork:
    """Which queries look at which keys, on the device; the same for all layers of a pass."""

    starts: torch.Tensor
    """[num_seqs + 1] int32, first row of each sequence's queries in q"""
    contexts: torch.Tensor
    """[num_seqs] int32, tokens that the sequence's last query sees, itself included; 0: padding"""
    tables: torch.Tensor
    """[any] int32, block ids of all sequences"""
    table_offsets: torch.Tensor
    """[num_seqs] int32, where in `tables` the sequence's blocks begin"""
    items: torch.Tensor
    """[num_items, 2] int32: sequence, first query within the sequence; sequence -1, or a query that there is not:
    nothing to do"""
    queries_per_item: int
    """consecutive queries of one sequence that an item covers, a power of two"""
    num_splits: int
    """programs that may share the keys of an item; 1: none do"""
    settled: bool = False
    """whether the tensors above were written by kernels that had ended before the one right ahead of this began: then
    they are read while that one still runs"""


class Tile(NamedTuple):
    """How one program goes through its keys."""

    num_keys: int
    """keys per turn, a multiple of BLOCK_SIZE and a power of two"""
    num_warps: int
    num_stages: int


def paged_attention(
    q: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    work: AttentionWork,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Attend from q [num_tokens, num_heads, head_dim] to the cache, the batch's own keys already written.

    The rows of q may lie apart; the caches [num_slots, num_kv_heads, head_dim] are contiguous. Rows that no item covers
    are undefined in the result (`out` if given, contiguous).
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = cache_k.shape[1]
    if not (cache_k.is_contiguous() and cache_v.is_contiguous()):
        raise ValueError("the key and value caches must be contiguous")
    if q.stride(1) != head_dim or q.stride(2) != 1:
        q = q.contiguous()
    if out is None:
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    num_splits, num_items = work.num_splits, work.items.shape[0]
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be between 1 and {MAX_SPLITS}, not {num_splits}")
    is_split = num_splits > 1
    partial_rows = num_tokens * num_heads * num_splits if is_split else 1
    partials = torch.empty(partial_rows * head_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(partial_rows, dtype=torch.float32, device=q.device)
    heads_per_kv = num_heads // num_kv_heads
    num_rows = max(MIN_ROWS, triton.next_power_of_2(work.queries_per_item * heads_per_kv))
    if tile is None:
        num_programs = num_kv_heads * num_items * num_splits
        programs_each = num_programs / backend.num_multiprocessors(q.device)
        tile = choose_tile(num_rows, head_dim, q.dtype, programs_each, num_tokens)
    pdl = programmatic_launch()
    _attend[(num_kv_heads, num_items, num_splits)](
        q,
        cache_k,
        cache_v,
        out,
        partials,
        weights,
        work.starts,
        work.contexts,
        work.tables,
        work.table_offsets,
        work.items,
        q.stride(0),
        # tanh(x) is computed from 2^(2 x log2 e), and what it yields is multiplied by softcap afterwards.
        0.0 if softcap is None else 2 * LOG2_E * scale / softcap,
        LOG2_E * (scale if softcap is None else softcap),
        QUERIES=work.queries_per_item,
        HEADS_PER_KV=heads_per_kv,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        ROWS=num_rows,
        KEYS=tile.num_keys,
        PAGE=BLOCK_SIZE,
        MIN_SPLIT_KEYS=MIN_SPLIT_KEYS,
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        EXACT=q.dtype is torch.float32,
        SETTLED=work.settled,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )
    if is_split:
        _merge[(num_tokens, num_heads)](
            partials,
            weights,
            out,
            num_splits,
            HEAD_DIM=head_dim,
            PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
            MAX_SPLITS=MAX_SPLITS,
            PDL=pdl,
            num_warps=8 if head_dim > 128 else 4,
            launch_pdl=pdl,
        )
    return out


def queries_per_item(longest_query: int, heads_per_kv: int, head_dim: int, dtype: torch.dtype) -> int:
    """How many queries an item should cover, for batches whose longest query is about `longest_query`.

    Never less than fills the smallest tile, since that is free: decoding and short verification share a variant.
    """
    # Exact float32 products hold whole rows in registers: only the smallest tile fits there.
    max_rows = MIN_ROWS if dtype is torch.float32 else MAX_ROWS if head_dim <= 128 else MAX_ROWS // 2
    num_queries = _floor_power_of_2(MIN_ROWS // heads_per_kv)
    while num_queries < longest_query and 2 * num_queries * heads_per_kv <= max_rows:
        num_queries *= 2
    return num_queries


def choose_tile(
    num_rows: int, head_dim: int, dtype: torch.dtype, programs_each: float = 1.0, num_tokens: int = LEAN_TOKENS + 1
) -> Tile:
    """Keys per turn, warps and pipeline depth for a tile of `num_rows` query rows, where every multiprocessor has so
    many programs, and the pass so many tokens."""
    row_bytes = max(16, triton.next_power_of_2(head_dim)) * dtype.itemsize
    if dtype is torch.float32:
        return Tile(max(16, min(32, 8192 // row_bytes)), 4, 2)
    num_keys = max(16, min(128, 16384 // row_bytes))
    # Two turns ahead where rows are wide, or smaller GPUs have too little shared memory for it.
    may_be_deep = num_tokens > LEAN_TOKENS and row_bytes <= 256
    if num_rows > MIN_ROWS:
        return Tile(num_keys, 4 if num_rows < 64 else num_rows // 16, 3 if may_be_deep else 2)
    # Alone on a multiprocessor a program waits for its keys: larger turns are fewer waits, or more are under way.
    if programs_each <= 1 and num_tokens <= FEW_TOKENS and row_bytes <= 256:
        return Tile(128, 4, 2)
    return Tile(num_keys, 4, 3 if may_be_deep and programs_each < 1.5 else 2)


def num_items_bound(num_tokens: int, num_seqs: int, queries_per_item: int) -> int:
    """The most items that `num_tokens` queries of up to `num_seqs` sequences can need, however they are shared."""
    num_seqs = min(num_seqs, num_tokens)
    return num_seqs + (num_tokens - num_seqs) // queries_per_item


def choose_splits(
    num_items: int, num_kv_heads: int, longest_context: int, num_multiprocessors: int, longest_query: int = 1
) -> int:
    """How many programs may share an item's keys: enough to fill the device, and to cut one very long context.

    An upper limit: short contexts are shared by fewer, see MIN_SPLIT_KEYS.
    """
    num_programs = max(1, num_items * num_kv_heads)
    to_fill = 1
    if num_programs < ENOUGH_PROGRAMS * num_multiprocessors:
        to_fill = -(-PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_programs)
    # Long queries are many items of similar length, and their partial results would take much memory.
    to_balance = longest_context // MAX_SPLIT_KEYS if longest_query <= MIN_ROWS else 1
    return max(1, min(max(to_fill, to_balance), longest_context // GOOD_SPLIT_KEYS, MAX_SPLITS))


def make_items(query_lens: NDArray[np.int64], queries_per_item: int) -> NDArray[np.int32]:
    """[num_items, 2]: sequence and first query, the queries that see most of their own prompt first."""
    counts = -(-query_lens // queries_per_item)
    seqs = np.repeat(np.arange(len(query_lens)), counts)
    first_items = np.repeat(np.cumsum(counts) - counts, counts)
    items = np.stack((seqs, (np.arange(len(seqs)) - first_items) * queries_per_item), axis=1).astype(np.int32)
    if len(items) == len(query_lens):
        return items
    # The longest work first: programs start in this order, and a long one that starts last is waited for by all.
    return items[np.argsort(-items[:, 1], kind="stable")]


def _floor_power_of_2(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


# The integers may be views of one buffer: wherever they begin, the same variant serves.
@triton.jit(do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_offsets", "items"])
def _attend(
    q: tl.tensor,
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    weights: tl.tensor,
    starts: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tensor,
    table_offsets: tl.tensor,
    items: tl.tensor,
    q_stride: tl.tensor,
    tanh_scale: tl.tensor,
    exponent_scale: tl.tensor,
    QUERIES: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL and not SETTLED:
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq = tl.load(items + 2 * item)
    first_query = tl.load(items + 2 * item + 1)
    if seq < 0:
        # Even so: the next kernel takes the end of this one for the end of all before it.
        if PDL and SETTLED:
            tl.extra.cuda.gdc_wait()
        return
    start = tl.load(starts + seq)
    query_len = tl.load(starts + seq + 1) - start
    if first_query >= query_len:  # whoever wrote the items did not know how long the sequence's would be
        if PDL and SETTLED:
            tl.extra.cuda.gdc_wait()
        return
    context = tl.load(contexts + seq)
    table = tables + tl.load(table_offsets + seq)

    # Row r of the tile is query r // HEADS_PER_KV under head r % HEADS_PER_KV.
    rows = tl.arange(0, ROWS)
    queries = first_query + rows // HEADS_PER_KV
    heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    is_row = (rows < QUERIES * HEADS_PER_KV) & (queries < query_len)
    positions = context - query_len + queries

    first_position = context - query_len + first_query
    end = tl.minimum(first_position + QUERIES, context)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // PAGE * PAGE
    split_keys = tl.maximum(tl.cdiv(tl.cdiv(end - begin, KEYS), num_splits) * KEYS, MIN_SPLIT_KEYS)
    begin += split * split_keys
    end = tl.minimum(end, begin + split_keys)
    has_keys = begin < end
    keys = begin + tl.arange(0, KEYS)
    blocks = tl.load(table + keys // PAGE, mask=keys < end, other=0)

    if PDL:
        if SETTLED:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = (start + queries).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    in_head = (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(
        q + (tokens * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :], mask=is_row[:, None] & in_head, other=0.0
    )
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Tiles that every row sees in full need no masks, which pays where the tile is large and the products dominate.
    PEEL: tl.constexpr = ROWS >= 64 and WINDOW == 0
    if PEEL:
        visible = tl.minimum(end, first_position + 1) - begin
        num_full = tl.maximum(visible, 0) // KEYS * KEYS
        acc, top, total, blocks = _attend_keys(
            acc, top, total, blocks, q_tile, positions, begin, begin + num_full, end, table, cache_k, cache_v, kv_head,
            tanh_scale, exponent_scale, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS, PAGE, 0, SOFTCAP, EXACT, False,
        )  # fmt: skip
        begin += num_full
    acc, top, total, blocks = _attend_keys(
        acc, top, total, blocks, q_tile, positions, begin, end, end, table, cache_k, cache_v, kv_head,
        tanh_scale, exponent_scale, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS, PAGE, WINDOW, SOFTCAP, EXACT, True,
    )  # fmt: skip

    # No keys at all (a padding sequence, a split beyond the context): zeros, not NaN.
    divisor = tl.where(total > 0, total, 1.0)
    acc = acc / divisor[:, None]
    out_rows = tokens * (NUM_KV_HEADS * HEADS_PER_KV) + heads
    store_mask = is_row[:, None] & in_head
    if num_splits == 1:
        tl.store(out + (out_rows * HEAD_DIM)[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=store_mask)
    else:
        out_rows = out_rows * num_splits + split
        # A weight of -inf tells `_merge` not to read the row.
        weight = tl.where(total > 0, top + tl.log2(divisor), -float("inf"))
        tl.store(weights + out_rows, weight, mask=is_row)
        if has_keys:
            tl.store(partials + (out_rows * HEAD_DIM)[:, None] + dims[None, :], acc, mask=store_mask)


@triton.jit
def _attend_keys(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    blocks: tl.tensor,
    q_tile: tl.tensor,
    positions: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    table_end: tl.tensor,
    table: tl.tensor,
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    kv_head: tl.tensor,
    tanh_scale: tl.tensor,
    exponent_scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys begin..end - 1 to an online softmax; `blocks` are the table entries of the first KEYS of them."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    dims = tl.arange(0, PADDED_DIM)
    offsets = tl.arange(0, KEYS)
    for tile in range(begin, end, KEYS):
        keys = tile + offsets
        # The table entries of the next turn, so that its keys are not requested only after a wait for these.
        next_blocks = tl.load(table + (keys + KEYS) // PAGE, mask=keys + KEYS < table_end, other=0)
        slots = blocks.to(tl.int64) * PAGE + offsets % PAGE
        addresses = (slots * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM)[:, None] + dims[None, :]
        in_cache = tl.full([KEYS, PADDED_DIM], True, tl.int1)
        if MASKED:
            in_cache = in_cache & (keys < end)[:, None]
        if PADDED_DIM > HEAD_DIM:
            in_cache = in_cache & (dims < HEAD_DIM)[None, :]
        k = tl.load(cache_k + addresses, mask=in_cache, other=0.0)
        scores = tl.dot(q_tile, k.T, input_precision=PRECISION)
        if SOFTCAP:
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * tanh_scale))
        if MASKED:
            seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            # Finite, since -inf less -inf is NaN where a row sees none of the keys.
            scores = tl.where(seen, scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, axis=1) * exponent_scale)
        weights = tl.exp2(scores * exponent_scale - new_top[:, None])
        if MASKED:
            # Even so: fused, the difference of two such products is what rounding took from one, and its power inf.
            weights = tl.where(seen, weights, 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        v = tl.load(cache_v + addresses, mask=in_cache, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
        blocks = next_blocks
    return acc, top, total, blocks


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    partials: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Weigh the results of all splits of one query head; splits that had no keys are not read."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    weight = tl.load(weights + row * num_splits + splits, mask=splits < num_splits, other=-float("inf"))
    has_keys = weight > -float("inf")
    partial = tl.load(
        partials + ((row * num_splits + splits) * HEAD_DIM)[:, None] + dims[None, :],
        mask=has_keys[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    top = tl.maximum(tl.max(weight, axis=0), -1e30)
    share = tl.exp2(weight - top)
    merged = tl.sum(partial * share[:, None], axis=0) / tl.maximum(tl.sum(share, axis=0), 1e-30)
    tl.store(out + row * HEAD_DIM + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
