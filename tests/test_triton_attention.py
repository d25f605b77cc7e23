"""The Triton attention against an explicit softmax per sequence: on a CUDA device, or interpreted on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from dsde.models.batch import BLOCK_SIZE
from dsde.models.kernels.attention import (
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    AttentionWork,
    choose_splits,
    choose_tile,
    make_items,
    num_items_bound,
    paged_attention,
    queries_per_item,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bfloat16 as integers"),
    ],
)
FAR_AWAY = 1 << 29
"""A block id that is read by mistake: an address no cache has."""


class Case:
    """A ragged batch whose blocks lie scattered in a cache that is NaN wherever no context lies."""

    def __init__(
        self,
        query_lens: list[int],
        contexts: list[int],
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        scale: float = SCALE,
    ) -> None:
        self.query_lens, self.contexts, self.scale = query_lens, contexts, scale
        rng = np.random.default_rng(seed)
        counts = [-(-context // BLOCK_SIZE) for context in contexts]
        free = rng.permutation(sum(counts) + 3)
        self.offsets = np.cumsum([0, *(count + 1 for count in counts)])
        self.tables = np.full(self.offsets[-1], FAR_AWAY)
        generator = torch.Generator().manual_seed(seed)
        shape = (len(free) * BLOCK_SIZE, num_kv_heads, head_dim)
        self.cache_k, self.cache_v = torch.full((2, *shape), torch.nan, dtype=dtype)
        self.slots = []
        for count, context, offset in zip(counts, contexts, self.offsets, strict=False):
            blocks, free = free[:count], free[count:]
            self.tables[offset : offset + count] = blocks
            slots = torch.from_numpy((blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()[:context])
            k, v = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(dtype)
            self.cache_k[slots], self.cache_v[slots] = k, v
            self.slots.append(slots)
        self.q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)

    def work(self, num_queries: int | None = None, num_splits: int = 1) -> AttentionWork:
        if num_queries is None:
            heads_per_kv = self.q.shape[1] // self.cache_k.shape[1]
            num_queries = queries_per_item(max(self.query_lens), heads_per_kv, self.q.shape[2], self.q.dtype)
        return AttentionWork(
            starts=on_device(np.cumsum([0, *self.query_lens])),
            contexts=on_device(np.array(self.contexts)),
            tables=on_device(self.tables),
            table_offsets=on_device(self.offsets[:-1]),
            items=on_device(make_items(np.array(self.query_lens), num_queries)),
            queries_per_item=num_queries,
            num_splits=num_splits,
        )

    def attend(self, work: AttentionWork, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        caches = self.cache_k.to(DEVICE), self.cache_v.to(DEVICE)
        return paged_attention(self.q.to(DEVICE), *caches, work, self.scale, window, softcap).cpu()

    def expected(self, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        outputs = []
        heads_per_kv = self.q.shape[1] // self.cache_k.shape[1]
        for slots, queries in zip(self.slots, self.q.float().split(self.query_lens), strict=True):
            k = self.cache_k[slots].float().repeat_interleave(heads_per_kv, dim=1)
            v = self.cache_v[slots].float().repeat_interleave(heads_per_kv, dim=1)
            scores = torch.einsum("qhd,khd->hqk", queries, k) * self.scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            keys = torch.arange(len(slots))
            positions = (len(slots) - len(queries) + torch.arange(len(queries)))[:, None]
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outputs)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(DEVICE)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[got.dtype]
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


RAGGED = {
    "one token": ([1], [1]),
    "decode": ([1, 1, 1], [5, 40, 17]),
    "verify": ([1, 4, 6, 2], [33, 16, 70, 130]),
    "prefill": ([40, 21], [40, 75]),
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_equals_reference(lengths: tuple[list[int], list[int]], window: int | None, softcap: float | None) -> None:
    case = Case(*lengths)
    check(case.attend(case.work(), window, softcap), case.expected(window, softcap))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(4, 1, 64), (2, 2, 80), (3, 1, 96), (8, 1, 128), (2, 1, 256), (7, 1, 48), (20, 1, 16)],
)
def test_head_shapes_and_dtypes(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    case = Case([1, 3], [50, 21], num_heads, num_kv_heads, head_dim, dtype)
    check(case.attend(case.work()), case.expected())


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_queries", [8, 16, 32])
def test_large_tiles(num_queries: int, window: int | None) -> None:
    """Where most tiles need no mask, which are handled apart."""
    case = Case([1, 70, 5], [300, 200, 5], 4, 1, 64, torch.float16)
    check(case.attend(case.work(num_queries), window), case.expected(window))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_splits", [2, 3, 12])
def test_split_keys(num_splits: int, window: int | None) -> None:
    """Long contexts are shared, short ones beside them are not; a split can lie beyond what some queries see."""
    edge = 2 * MIN_SPLIT_KEYS + 1
    case = Case([1, 2, 1, 3], [3 * MIN_SPLIT_KEYS + 7, edge, 9, MIN_SPLIT_KEYS], 4, 2, 32, torch.float16)
    check(case.attend(case.work(num_splits=num_splits), window), case.expected(window))


def test_split_prefill() -> None:
    case = Case([40], [2 * MIN_SPLIT_KEYS + 20], 4, 1, 64, torch.float16)
    check(case.attend(case.work(32, num_splits=2)), case.expected())


def test_queries_may_be_a_strided_view() -> None:
    case = Case([2, 1], [20, 33], 4, 2, 32)
    qkv = torch.randn(3, 8 * 32)
    case.q = qkv[:, : 4 * 32].view(3, 4, 32)
    check(case.attend(case.work()), case.expected())


@pytest.mark.parametrize("num_splits", [1, 2])
def test_padding_does_nothing(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused items, sequences without context and rows that belong to nobody, as a captured graph has them; and memory
    that nobody has written holds the worst there is."""
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: torch.full(size, torch.inf, **kwargs))
    case = Case([1, 2], [30, 18])
    work = case.work(4, num_splits)
    work.starts = torch.cat((work.starts, work.starts[-1:], work.starts[-1:]))
    work.contexts = torch.cat((work.contexts, torch.zeros(2, dtype=torch.int32, device=DEVICE)))
    work.table_offsets = torch.cat((work.table_offsets, on_device(np.array([FAR_AWAY, FAR_AWAY]))))
    work.items = torch.cat((work.items, on_device(np.array([[2, 0], [-1, 0], [3, 0], [-1, 1 << 20]]))))
    rows = torch.cat((case.q, torch.full((5, 6, 16), torch.nan)))
    caches = case.cache_k.to(DEVICE), case.cache_v.to(DEVICE)
    out = torch.full((8, 6, 16), 7.0, device=DEVICE)
    paged_attention(rows.to(DEVICE), *caches, work, SCALE, out=out)
    check(out[:3].cpu(), case.expected())
    if num_splits == 1:
        assert (out[3:] == 7).all()


def test_a_padding_sequence_with_queries_gets_zeros() -> None:
    case = Case([1, 2], [30, 18])
    work = case.work()
    work.contexts[1] = 0
    got = case.attend(work)
    check(got[:1], case.expected()[:1])
    assert (got[1:] == 0).all()


def test_bad_arguments() -> None:
    case = Case([1], [5])
    with pytest.raises(ValueError, match="num_splits"):
        case.attend(case.work(num_splits=MAX_SPLITS + 1))
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(case.q, case.cache_k.transpose(0, 1), case.cache_v, case.work(), SCALE)


@pytest.mark.parametrize("num_queries", [1, 4, 16])
def test_items_cover_every_query_once(num_queries: int) -> None:
    query_lens = np.array([1, 0, 17, 4, 5, 33, 16])
    covered = [
        (seq, query)
        for seq, first in make_items(query_lens, num_queries).tolist()
        for query in range(first, min(first + num_queries, query_lens[seq]))
    ]
    assert sorted(covered) == [(seq, query) for seq, length in enumerate(query_lens) for query in range(length)]


def test_bound_of_items_is_reached_and_never_passed() -> None:
    def shares(num_tokens: int, num_seqs: int) -> list[list[int]]:
        if num_seqs == 1:
            return [[num_tokens]]
        return [[n, *rest] for n in range(num_tokens + 1) for rest in shares(num_tokens - n, num_seqs - 1)]

    for num_tokens in range(1, 9):
        for num_seqs in (1, 2, 4):
            for num_queries in (1, 2, 4):
                most = max(len(make_items(np.array(share), num_queries)) for share in shares(num_tokens, num_seqs))
                assert num_items_bound(num_tokens, num_seqs, num_queries) == most


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("scale", [16**-0.5, 32**-0.5, 64**-0.5, 96**-0.5, 128**-0.5, 256**-0.5, 0.3])
def test_queries_without_a_key_in_a_split_or_a_window(scale: float, dtype: torch.dtype) -> None:
    """Whatever the scale: rounding may go either way, and what is nothing must not become everything."""
    case = Case([5, 2], [MIN_SPLIT_KEYS + 2, 2 * MIN_SPLIT_KEYS + 1], 4, 2, 16, dtype, scale=scale)
    check(case.attend(case.work(num_splits=2)), case.expected())
    check(case.attend(case.work(num_splits=4)), case.expected())
    check(case.attend(case.work(), window=3), case.expected(window=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 8, 20, 64])
def test_tile_choice(heads_per_kv: int, dtype: torch.dtype) -> None:
    for head_dim in (16, 64, 80, 128, 256):
        for longest_query in (1, 2, 5, 17, 300):
            num_queries = queries_per_item(longest_query, heads_per_kv, head_dim, dtype)
            assert num_queries.bit_count() == 1
            assert num_queries * heads_per_kv <= max(128, heads_per_kv)
            tile = choose_tile(128, head_dim, dtype)
            assert tile.num_keys % BLOCK_SIZE == 0
            assert tile.num_keys.bit_count() == 1


def test_choice_of_splits() -> None:
    assert choose_splits(1, 8, 200, 132) == 1
    assert choose_splits(256, 8, 300, 132) == 1
    assert choose_splits(256, 8, 2048, 132) == 1
    assert 8 * choose_splits(1, 8, 32768, 132) >= 132
    assert choose_splits(256, 8, 32768, 132) > 1
    assert choose_splits(512, 8, 32768, 132, longest_query=2048) == 1
    assert choose_splits(1, 1, 1 << 20, 132) == MAX_SPLITS


def test_programs_that_fill_a_device_are_not_split() -> None:
    assert choose_splits(16, 8, 2048, 132) == choose_splits(64, 2, 2048, 132) == 1
    assert choose_splits(8, 8, 2048, 132) > 1
    assert choose_splits(16, 8, 32768, 132) > 1, "or one long context outlasts all others"


@pytest.mark.parametrize("num_rows", [16, 32, 64, 128])
def test_few_tokens_leave_the_cache_to_products(num_rows: int) -> None:
    """Where there are more the pipeline may be deeper; where there is hardly anything to read turns may be longer."""

    def shared_bytes(programs_each: float, num_tokens: int) -> int:
        tile = choose_tile(num_rows, 128, torch.bfloat16, programs_each, num_tokens)
        return 2 * tile.num_keys * 128 * 2 * tile.num_stages

    assert max(shared_bytes(each, num) for each in (0.1, 1.0, 1.01, 5.0) for num in (5, 8, 16)) <= 64 << 10
    assert max(shared_bytes(each, num) for each in (1.01, 5.0) for num in (1, 4)) <= 64 << 10
    assert shared_bytes(1.0, 17) > 64 << 10
    assert (shared_bytes(1.0, 4) > 64 << 10) == (num_rows == 16)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_items_for_queries_that_there_are_not_do_nothing(num_splits: int) -> None:
    case = Case([3, 1, 5], [20, 300, 40], 4, 2, 16, torch.float32)
    work = case.work(2, num_splits)
    work.items = on_device(np.array([(seq, first) for first in (0, 2, 4, 6) for seq in range(3)]))
    check(case.attend(work), case.expected())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_captured_graph_serves_other_lengths(num_splits: int) -> None:
    first = Case([1, 1, 3], [20, 1900, 40], 8, 2, 128, torch.bfloat16)
    then = Case([2, 1, 2], [1500, 30, 999], 8, 2, 128, torch.bfloat16, seed=1)
    work, work_then = first.work(1, num_splits), then.work(1, num_splits)
    num_slots = max(len(first.cache_k), len(then.cache_k))
    q, (cache_k, cache_v) = first.q.to(DEVICE), torch.zeros(2, num_slots, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    work.tables = torch.zeros(max(len(first.tables), len(then.tables)), dtype=torch.int32, device=DEVICE)

    def load(case: Case, lengths: AttentionWork) -> None:
        for mine, theirs in zip(
            (work.starts, work.contexts, work.tables, work.table_offsets, work.items, q, cache_k, cache_v),
            (
                *(lengths.starts, lengths.contexts, lengths.tables, lengths.table_offsets, lengths.items),
                *(case.q, case.cache_k, case.cache_v),
            ),
            strict=True,
        ):
            mine[: len(theirs)].copy_(theirs)

    load(first, first.work(1))
    paged_attention(q, cache_k, cache_v, work, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, cache_k, cache_v, work, SCALE)
    for case, lengths in ((first, first.work(1)), (then, work_then)):
        load(case, lengths)
        graph.replay()
        check(out.cpu(), case.expected())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_cache_offsets_beyond_32_bits() -> None:
    case = Case([1], [40], 4, 1, 128, torch.bfloat16)
    last = (1 << 31) // (128 * BLOCK_SIZE) + 1
    cache_k, cache_v = torch.empty(2, (last + 3) * BLOCK_SIZE, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.arange(40) + last * BLOCK_SIZE
    cache_k[slots], cache_v[slots] = case.cache_k[case.slots[0]].to(DEVICE), case.cache_v[case.slots[0]].to(DEVICE)
    work = case.work()
    work.tables = on_device(last + np.arange(3))
    check(paged_attention(case.q.to(DEVICE), cache_k, cache_v, work, SCALE).cpu(), case.expected())
