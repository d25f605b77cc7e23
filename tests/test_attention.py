"""Paged attention against a loop over sequences with an explicit softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsde.models import attention
from dsde.models.attention import paged_attention, write_kv
from dsde.models.batch import BLOCK_SIZE, PackedBatch, pack

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
SCALE = 0.3


def reference_attention(
    q: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    batch: PackedBatch,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    outputs = []
    row = 0
    for seq, (query_len, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        keys = torch.arange(int(context))
        slots = batch.block_tables[seq, keys // BLOCK_SIZE] * BLOCK_SIZE + keys % BLOCK_SIZE
        k = cache_k[slots].float().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1)
        v = cache_v[slots].float().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1)
        for position in range(int(context - query_len), int(context)):
            scores = torch.einsum("hd,khd->hk", q[row].float(), k) * SCALE
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            visible = keys <= position
            if window is not None:
                visible &= keys > position - window
            weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, v))
            row += 1
    return torch.stack(outputs)


def random_batch(query_lens: list[int], context_lens: list[int], seed: int = 0, device: str = "cpu") -> PackedBatch:
    """Sequences whose blocks lie scattered over the pool."""
    rng = np.random.default_rng(seed)
    counts = [-(-context // BLOCK_SIZE) for context in context_lens]
    free = rng.permutation(sum(counts) + 5).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    tokens = np.zeros(sum(query_lens), dtype=np.int64)
    return pack(tokens, np.array(query_lens), np.array(context_lens), tables, None, torch.device(device))


def random_cache(context_lens: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_slots = (sum(-(-context // BLOCK_SIZE) for context in context_lens) + 5) * BLOCK_SIZE
    k, v = torch.randn(2, num_slots, NUM_KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    return k, v


RAGGED = {
    "one token": ([1], [1]),
    "decode": ([1, 1, 1], [5, 40, 17]),
    "verify, uniform": ([5, 5], [37, 48]),
    "verify, ragged": ([1, 4, 6, 2], [33, 16, 70, 200]),
    "far apart contexts": ([1, 3, 1, 2, 1], [2, 700, 650, 9, 320]),
    "first chunks": ([40, 100], [40, 100]),
    "later chunk": ([50], [130]),
    "everything": ([1, 60, 3, 33, 1, 17], [90, 60, 44, 300, 1, 17]),
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 24, 64])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_equals_reference(lengths: tuple[list[int], list[int]], window: int | None, softcap: float | None) -> None:
    batch = random_batch(*lengths)
    cache_k, cache_v = random_cache(lengths[1], torch.float32)
    q = torch.randn(sum(lengths[0]), NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    got = paged_attention(q, cache_k, cache_v, batch, SCALE, window, softcap)
    torch.testing.assert_close(got, reference_attention(q, cache_k, cache_v, batch, window, softcap))


@pytest.mark.parametrize("window", [None, 24])
def test_a_long_query_cut_into_pieces_gives_the_same(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", 2000)
    lengths = ([2, 90], [30, 150])
    batch = random_batch(*lengths)
    cache_k, cache_v = random_cache(lengths[1], torch.float32)
    q = torch.randn(92, NUM_HEADS, HEAD_DIM)
    got = paged_attention(q, cache_k, cache_v, batch, SCALE, window)
    assert len(next(iter(batch.plan.values())).groups) > 2
    torch.testing.assert_close(got, reference_attention(q, cache_k, cache_v, batch, window, None))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bfloat16_accumulates_in_float32(softcap: float | None) -> None:
    lengths = ([1, 3, 40], [900, 400, 200])
    batch = random_batch(*lengths)
    cache_k, cache_v = random_cache(lengths[1], torch.bfloat16)
    q = torch.randn(44, NUM_HEADS, HEAD_DIM).bfloat16()
    got = paged_attention(q, cache_k, cache_v, batch, SCALE, None, softcap)
    assert got.dtype is torch.bfloat16
    expected = reference_attention(q, cache_k, cache_v, batch, None, softcap)
    torch.testing.assert_close(got.float(), expected, atol=1e-2, rtol=1e-2)


def test_random_ragged_batches() -> None:
    rng = np.random.default_rng(3)
    for seed in range(20):
        num_seqs = int(rng.integers(1, 12))
        query_lens = rng.choice([1, 2, 5, 9, 30], num_seqs).tolist()
        context_lens = [query + int(rng.integers(0, 120)) for query in query_lens]
        batch = random_batch(query_lens, context_lens, seed)
        cache_k, cache_v = random_cache(context_lens, torch.float32)
        q = torch.randn(sum(query_lens), NUM_HEADS, HEAD_DIM)
        window = [None, 20][seed % 2]
        got = paged_attention(q, cache_k, cache_v, batch, SCALE, window)
        torch.testing.assert_close(got, reference_attention(q, cache_k, cache_v, batch, window, None))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_cuda_equals_cpu(lengths: tuple[list[int], list[int]], window: int | None, softcap: float | None) -> None:
    cache_k, cache_v = random_cache(lengths[1], torch.float32)
    q = torch.randn(sum(lengths[0]), NUM_HEADS, HEAD_DIM)
    expected = reference_attention(q, cache_k, cache_v, random_batch(*lengths), window, softcap)
    batch = random_batch(*lengths, device="cuda")
    got = paged_attention(q.cuda(), cache_k.cuda(), cache_v.cuda(), batch, SCALE, window, softcap)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-3)


def test_the_plan_is_made_once_per_window() -> None:
    batch = random_batch([1, 2], [20, 30])
    cache_k, cache_v = random_cache([20, 30], torch.float32)
    q = torch.randn(3, NUM_HEADS, HEAD_DIM)
    for window in (None, 8, None, 8):
        paged_attention(q, cache_k, cache_v, batch, SCALE, window)
    assert len(batch.plan) == 2


def test_write_kv_touches_only_its_slots() -> None:
    cache_k, cache_v = torch.zeros(2, 32, NUM_KV_HEADS, HEAD_DIM)
    k, v = torch.randn(2, 3, NUM_KV_HEADS, HEAD_DIM)
    slots = torch.tensor([7, 31, 2])
    write_kv(cache_k, cache_v, k, v, slots)
    assert torch.equal(cache_k[slots], k)
    assert torch.equal(cache_v[slots], v)
    assert cache_k.count_nonzero() == k.count_nonzero()
